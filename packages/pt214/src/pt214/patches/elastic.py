"""``init_process_group`` makes a group that can be re-formed; ``torch.distributed.set_option``."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from pt214.parts import load
from pt214.patching import PatchSet

__all__ = ["apply"]


def apply(patches: PatchSet) -> str:
    """Replace ``init_process_group`` under both its names, and add ``set_option``."""
    ours = load("elastic", why="pt214.enable(elastic=True)")
    stock = dist.init_process_group
    inside = threading.local()

    @functools.wraps(stock)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        # pt214-elastic makes its group by calling torch's own function, found under the same name.
        if getattr(inside, "busy", False):
            return stock(*args, **kwargs)
        inside.busy = True
        try:
            ours.init_process_group(*args, **kwargs)
        finally:
            inside.busy = False
        return None

    for owner in (dist, distributed_c10d):
        patches.set(owner, "init_process_group", init_process_group)
    patches.set(dist, "set_option", ours.set_option)
    return "init_process_group makes re-formable groups; torch.distributed.set_option is there"
