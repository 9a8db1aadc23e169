"""What a caller of a save may choose, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pt214_dcp.arena import LEAST_BYTES, available_bytes
from pt214_dcp.errors import BadOption
from pt214_dcp.exchange import TIMEOUT_S, check_timeout
from pt214_dcp.progress import Meter
from pt214_dcp.stores.place import Where


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How one save goes; names and meanings as in ``api.async_save``."""

    timeout_s: float = TIMEOUT_S
    overwrite: bool = True
    staging_bytes: int | None = None
    overlap: tuple[torch.optim.Optimizer, ...] = ()
    base: Where | None = None
    hashes: bool = False
    key_group: str | None = None
    progress: Meter | None = None

    @property
    def budget_bytes(self) -> int:
        """Bytes that staging may hold: what was asked for, or half of what is free."""
        if self.staging_bytes is not None:
            return self.staging_bytes
        free = available_bytes()
        return max(LEAST_BYTES, free // 2) if free is not None else 1 << 62


def save_options(**chosen: Any) -> SaveOptions:
    """Check what a caller chose.

    Raises:
        BadOption: a value that can't be; the message names the argument.
    """
    timeout_s, staging = chosen.get("timeout_s", TIMEOUT_S), chosen.get("staging_bytes")
    check_timeout(timeout_s)
    if staging is not None and (type(staging) is not int or staging < LEAST_BYTES):
        raise BadOption(
            f"staging_bytes is {staging!r}; it must be a whole number of at least {LEAST_BYTES}, "
            "or None for half of the free memory"
        )
    overlap = chosen.pop("overlap", None) or ()
    if isinstance(overlap, torch.optim.Optimizer):
        overlap = (overlap,)
    for optimizer in overlap:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise BadOption(
                f"overlap holds a {type(optimizer).__name__}; only a torch.optim.Optimizer has the "
                "hook before step that keeps a copy whole: leave others out"
            )
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise BadOption(
                "overlap holds a capturable optimizer; replayed from a CUDA graph it runs no hook, "
                "so leave it out"
            )
    return SaveOptions(overlap=tuple(overlap), **chosen)
