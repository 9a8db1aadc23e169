"""``torch.mps`` calls become harmless where there is no MPS.

Only calls whose absence changes no result: memory limits, synchronisation, seeds, statistics.
``compile_shader``, events and RNG states stay as they are: pretending there would be a lie.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from pt214.patching import PatchSet

__all__ = ["apply"]

# name -> what the call returns without a device
HARMLESS: dict[str, int | None] = {
    "current_allocated_memory": 0,
    "driver_allocated_memory": 0,
    "empty_cache": None,
    "manual_seed": None,
    "recommended_max_memory": 0,
    "seed": None,
    "set_per_process_memory_fraction": None,
    "synchronize": None,
}


class _Harmless:
    """Stands in for one function of ``torch.mps``; all of them share one warning."""

    warned = False

    def __init__(self, name: str, result: int | None) -> None:
        self.__name__ = name
        self._result = result

    def __call__(self, *args: Any, **kwargs: Any) -> int | None:
        if not _Harmless.warned:
            _Harmless.warned = True
            warnings.warn(
                f"torch.mps.{self.__name__}: this machine has no MPS device, so torch.mps calls "
                "do nothing here (pt214.enable(mps=False) makes them errors again)",
                stacklevel=2,
            )
        return self._result


def apply(patches: PatchSet) -> str:
    """Replace the harmless calls, unless MPS is there."""
    if torch.backends.mps.is_available():
        return "MPS is available: torch.mps is left as it is"
    _Harmless.warned = False
    for name, result in HARMLESS.items():
        patches.set(torch.mps, name, _Harmless(name, result))
    return "no MPS device: torch.mps calls do nothing, with one warning"
