"""What each rank has for itself: random state, a data loader's place, statistics never averaged.

Plain tensors and values must be equal on all ranks, since one copy of them is kept. Where they
differ for a reason, say so:

>>> import torch
>>> state = {"rng": PerRank(torch.get_rng_state()), "step": 3}

On the same number of ranks each rank gets its own back. On another number nobody can know what is
right, so ``resize`` says it.
"""

from __future__ import annotations

import enum
from typing import Any


class Resize(enum.Enum):
    """What a rank gets when the checkpoint was saved by another number of ranks."""

    ERROR = "error"  # the load fails and names the key
    KEEP = "keep"  # what the state dict to fill already holds
    WRAP = "wrap"  # what rank ``r % saved_world_size`` saved


class PerRank:
    """Mark ``value`` as this rank's own.

    Args:
        value: any data: a tensor, a number, a dict of them. ``load`` fills tensors in place and
            replaces the rest in ``value``.
        resize: "error", "keep" or "wrap"; see ``Resize``. The state dict to fill decides.

    Raises:
        ValueError: ``resize`` is none of these.
    """

    __slots__ = ("resize", "value")

    def __init__(self, value: Any, *, resize: str | Resize = Resize.ERROR) -> None:
        try:
            self.resize = Resize(resize)
        except ValueError:
            allowed = ", ".join(repr(choice.value) for choice in Resize)
            raise ValueError(f"resize is {resize!r}; it must be one of {allowed}") from None
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r}, resize={self.resize.value!r})"
