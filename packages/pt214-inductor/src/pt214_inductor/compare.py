"""Compile one function with stock inductor and with ours, side by side, and say what differs.

Both compiles run cold, with inductor's caches off, so that every pass really runs and the sources
are the ones this call produced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pt214_inductor import compat
from pt214_inductor.counting import Counts, count
from pt214_inductor.record import Decision, listening


@dataclass(frozen=True, slots=True)
class Comparison:
    """What stock and this backend made of the same call."""

    stock: Counts
    ours: Counts
    decisions: tuple[Decision, ...]
    difference: float  # largest absolute difference between the two results

    def __str__(self) -> str:
        rows = [f"{'':10}{'graphs':>8}{'kernels':>9}{'loops':>7}{'launches':>10}{'extern':>8}"]
        for name, c in (("stock", self.stock), ("pt214", self.ours)):
            cells = f"{c.graphs:8}{c.kernels:9}{c.loops:7}{c.launches:10}{c.extern:8}"
            rows.append(f"{name:10}{cells}")
        rows.append(f"largest difference of the results: {self.difference:.3g}")
        rows += [f"{d.where}: {d.pass_name} {d.what} ({d.detail})" for d in self.decisions]
        return "\n".join(rows if self.decisions else [*rows, "no pass found a place to change"])


def explain(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Comparison:
    """Compile ``fn`` twice, run it once each, and compare.

    Args:
        fn: a module or function; one that is compiled already is taken apart first.
        args: what to call it with. The backward is not run.
        dynamic: as in ``torch.compile``.

    Returns:
        Counts for both, and each decision of our passes with its reason; ``print`` shows a table.

    Raises:
        TypeError: ``fn`` is not callable.
    """
    if not callable(fn):
        raise TypeError(f"fn: got {type(fn).__name__}, allowed are modules and functions")
    fn = getattr(fn, "_orig_mod", getattr(fn, "_torchdynamo_orig_callable", fn))
    stock, stock_result, _ = _compiled("inductor", fn, args, dynamic)
    ours, our_result, decisions = _compiled("pt214", fn, args, dynamic)
    return Comparison(stock, ours, tuple(decisions), _difference(stock_result, our_result))


def _compiled(
    backend: str, fn: Callable[..., Any], args: tuple[Any, ...], dynamic: bool | None
) -> tuple[Counts, Any, list[Decision]]:
    torch._dynamo.reset()
    with listening() as decisions, generated_sources() as sources, compat.no_caches():
        result = torch.compile(fn, backend=_resolve(backend), dynamic=dynamic)(*args)
    torch._dynamo.reset()
    return count(sources), result, decisions


def _resolve(backend: str) -> Any:
    if backend == "inductor":
        return backend
    from pt214_inductor.backend import compile_fx  # works from a source tree without metadata too

    return compile_fx


@contextmanager
def generated_sources() -> Iterator[list[str]]:
    """Every wrapper that inductor writes inside the block."""
    from torch._inductor.graph import GraphLowering

    lowering: Any = GraphLowering

    found: list[str] = []
    stock = lowering.save_output_code
    lowering.save_output_code = staticmethod(found.append)
    try:
        yield found
    finally:
        lowering.save_output_code = staticmethod(stock)


def _difference(left: Any, right: Any) -> float:
    from torch.utils import _pytree

    pairs = zip(_pytree.tree_leaves(left), _pytree.tree_leaves(right), strict=True)
    gaps = [
        (a.double() - b.double()).abs().max().item()
        for a, b in pairs
        if isinstance(a, torch.Tensor) and a.numel()
    ]
    return max(gaps, default=0.0)
