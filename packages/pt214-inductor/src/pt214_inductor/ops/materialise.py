"""``materialise(x)``: the identity, as a promise that ``x`` gets a buffer of its own.

Inductor inlines a producer into each consumer's loop, so a value computed once per channel is
computed again for every element. This op's lowering realizes the value, which no public aten op
asks for. It exists between our graph pass and inductor's lowering and is never seen by autograd.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("pt214_inductor", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("materialise(Tensor x) -> Tensor")


def _reference(x: torch.Tensor) -> torch.Tensor:
    return x.clone()  # an op may not return its input


_LIBRARY.impl("materialise", _reference, "CompositeExplicitAutograd")


def overload() -> Any:
    """The op as graph passes name it."""
    return torch.ops.pt214_inductor.materialise.default


@cache
def register_lowering() -> None:
    """Teach inductor the op; called by the first compile, since it imports inductor."""
    from torch._inductor.lowering import register_lowering as register

    def lower(x: Any) -> Any:
        x.realize()
        return x

    register(overload(), type_promotion_kind=None)(lower)
