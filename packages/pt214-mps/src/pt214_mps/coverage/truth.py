"""Who answers the question "does this operator have an MPS kernel?", and how far to trust it.

On a Mac the dispatcher of the running torch answers. Elsewhere its MPS kernels are not compiled in,
so the operator list it was built from answers instead, and the report says so.
"""

from __future__ import annotations

import enum

import torch

from pt214_mps.coverage.yaml_table import COMPOSITE, declared

__all__ = ["Truth"]


class Truth(enum.Enum):
    """The source of an answer."""

    DISPATCHER = "the dispatcher of this torch"
    LIST = "the operator list this torch was built from; not yet run on a Mac"

    @classmethod
    def here(cls) -> Truth:
        """The best source on this machine."""
        return cls.DISPATCHER if torch.backends.mps.is_built() else cls.LIST

    def names(self) -> list[str]:
        """Every aten operator, with its overload."""
        if self is Truth.LIST:
            return declared().names()
        found = torch._C._dispatch_get_all_op_names()
        return [name.removeprefix("aten::") for name in found if name.startswith("aten::")]

    def knows(self, name: str) -> bool:
        """Whether ``aten::<name>`` exists. ``name`` is well-formed: the dispatcher parses it."""
        if self is Truth.LIST:
            return declared().knows(name)
        return bool(torch._C._dispatch_has_kernel(f"aten::{name}"))

    def has_kernel(self, name: str) -> bool:
        """Whether stock torch has an MPS kernel for ``aten::<name>``."""
        if self is Truth.LIST:
            return declared().has_kernel(name)
        base, _, overload = name.partition(".")
        variants = {name, f"{base}.out", f"{base}.{overload}_out"}  # structured: only .out has one
        ask = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(
            torch._C._dispatch_has_kernel(f"aten::{each}") and ask(f"aten::{each}", "MPS")
            for each in variants
        )

    def is_composite(self, name: str) -> bool:
        """Whether ``aten::<name>`` is made of other operators.

        That is the same on every machine, so the list tells. The dispatcher can't: it holds one
        CompositeExplicitAutogradNonFunctional kernel for what is written by hand in terms of other
        operators and for each wrapper around a structured operator's .out, which needs a kernel.
        """
        if self is Truth.LIST or declared().knows(name):
            return declared().is_composite(name)
        ask = torch._C._dispatch_has_kernel_for_dispatch_key
        return any(ask(f"aten::{name}", key) for key in COMPOSITE[:2])
