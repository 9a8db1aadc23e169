"""``torch.compile`` without a ``backend=`` uses pt214-inductor's."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pt214.patching import PatchSet

__all__ = ["apply"]

BACKEND = "pt214"  # found by torch through pt214-inductor's entry point


def apply(patches: PatchSet) -> str:
    """Put a wrapper over ``torch.compile``; a call that names a backend is passed on as it is."""
    stock = torch.compile

    @functools.wraps(stock)
    def compile(*args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("backend", BACKEND)
        return stock(*args, **kwargs)

    patches.set(torch, "compile", compile)
    return f"torch.compile uses backend={BACKEND!r} where none is named"
