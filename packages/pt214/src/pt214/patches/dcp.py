"""``torch.distributed.checkpoint.save_state_dict`` and ``load_state_dict`` take ``path=``.

With ``path=`` they are pt214-dcp's (the save is asynchronous and returns its handle); without it
they are stock's, deprecation warning included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed.checkpoint as stock

from pt214.parts import load
from pt214.patching import PatchSet

__all__ = ["apply"]

STORAGE = ("storage_writer", "storage_reader")


def apply(patches: PatchSet) -> str:
    """Wrap both names where scripts import them from."""
    ours = load("dcp", why="pt214.enable(dcp=True)")
    for name in ("save_state_dict", "load_state_dict"):
        patches.set(stock, name, _with_path(getattr(stock, name), getattr(ours, name)))
    return "torch.distributed.checkpoint.save_state_dict and load_state_dict take path="


def _with_path(stock_call: Callable[..., Any], our_call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock_call)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "path" not in kwargs:
            return stock_call(*args, **kwargs)
        storage = [*args[1:], *(kwargs[name] for name in STORAGE if name in kwargs)]
        if storage:
            raise TypeError(
                f"{stock_call.__name__}() got path={kwargs['path']!r} and a "
                f"{type(storage[0]).__name__}: give one place, a path or a storage"
            )
        return our_call(*args, **kwargs)

    return call
