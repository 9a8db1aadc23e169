"""Where MPS is, kernels of pt214-mps serve; where it is not, ``torch.mps`` calls become harmless.

Only calls whose absence changes no result: memory limits, synchronisation, seeds, statistics.
``compile_shader``, events and RNG states stay as they are: pretending there would be a lie.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch

from pt214.parts import load, part
from pt214.patching import PatchSet

__all__ = ["apply"]

SERVED = "mps"  # device of the tensors that kernels take over
MAX_COLS = 65_536  # of pt214_mps.rms_norm

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
        # torch.manual_seed seeds every device; a script that calls it has said nothing of MPS.
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not _Harmless.warned and not caller.startswith("torch."):
            _Harmless.warned = True
            warnings.warn(
                f"torch.mps.{self.__name__}: this machine has no MPS device, so torch.mps calls "
                "do nothing here (pt214.enable(mps=False) makes them errors again)",
                stacklevel=2,
            )
        return self._result


def apply(patches: PatchSet) -> str:
    """Put kernels in place where MPS is, else replace the harmless calls."""
    if torch.backends.mps.is_available():
        return _serve_kernels(patches)
    _Harmless.warned = False
    for name, result in HARMLESS.items():
        patches.set(torch.mps, name, _Harmless(name, result))
    return "no MPS device: torch.mps calls do nothing, with one warning"


def _serve_kernels(patches: PatchSet) -> str:
    if not part("mps").installed:
        return f"torch.mps is left as it is; {part('mps').install} adds kernels"
    rms_norm = load("mps", why="enable(mps=True)").rms_norm
    stock = torch.nn.functional.rms_norm

    @functools.wraps(stock)
    def served(
        input: torch.Tensor,
        normalized_shape: list[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        if weight is None or not _fits(input, normalized_shape, weight):
            return stock(input, normalized_shape, weight, eps)
        usual = torch.finfo(input.dtype).eps
        found: torch.Tensor = rms_norm(input, weight, usual if eps is None else eps)
        return found

    patches.set(torch.nn.functional, "rms_norm", served)
    return "rms_norm on MPS is pt214-mps' (not yet run on a Mac); torch.mps is left as it is"


def _fits(input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor) -> bool:
    """Whether our kernel takes these; whatever else they are is stock's to serve or to refuse."""
    return (
        input.device.type == SERVED
        and input.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and (weight.dtype, weight.device, tuple(weight.shape))
        == (input.dtype, input.device, tuple(normalized_shape))
        and len(normalized_shape) == 1
        and input.shape[-1:] == weight.shape
        and 1 <= weight.numel() <= MAX_COLS
    )
