"""Hoist the coefficients of an affine chain out of the loop over the big tensor.

    y = ((x - mean) * (1 / sqrt(var + eps))) * w + b          BatchNorm in eval, as decomposed
    y = (x - center) * scale + shift                          after this pass
        scale = materialise(1 / sqrt(var + eps) * w)          one small kernel, once

Inductor inlines the small producers into the big loop: a square root and a division for every
element of ``x``. The centre stays apart: folding it into the shift would cancel badly where
``|mean| >> sqrt(var)``, and eager's CUDA kernel does not do that either.

A chain is any run of add, sub, mul, div in float32 or float64 whose other operand is a
*coefficient*: a tensor of static, small size computed from graph inputs by the pointwise ops below.
Coefficients that come from a reduction are left alone, since inductor fuses those loops with their
reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from pt214_inductor import compat
from pt214_inductor.ops import materialise
from pt214_inductor.policy.affine import Chain, Verdict, decide
from pt214_inductor.record import Decision, record

NAME = "hoist_affine"
aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default

ADD, SUB = aten.add.Tensor, aten.sub.Tensor
MUL, DIV = aten.mul.Tensor, aten.div.Tensor
STEPS = (ADD, SUB, MUL, DIV)
ARITHMETIC = {*STEPS, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default,
              aten.neg.default, aten.pow.Tensor_Scalar}  # fmt: skip
VIEWS = {CONVERT, aten.unsqueeze.default, aten.view.default, aten.reshape.default,
         aten.squeeze.dim, aten.squeeze.dims}  # fmt: skip
DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Step:
    """One affine operation: its node, the big operand and the coefficient."""

    node: Node
    big: Node
    coefficient: Node


def run(graph: Graph) -> int:
    """Rewrite every chain that pays; return how many were rewritten."""
    seen: set[Node] = set()
    rewritten = 0
    for node in reversed(list(graph.nodes)):
        steps = [] if node in seen else find_chain(node)
        seen.update(step.node for step in steps)
        if len(steps) < 2:
            continue
        chain = describe(steps)
        verdict = decide(chain)
        record(Decision(node.name, NAME, verdict.value, f"{chain}"))
        if verdict is Verdict.HOIST:
            rewrite(graph, steps)
            rewritten += 1
    return rewritten


def find_chain(end: Node) -> list[Step]:
    """The affine steps that end in ``end``, first one first; empty if ``end`` is no step."""
    steps: list[Step] = []
    step = as_step(end)
    while step is not None:
        steps.append(step)
        inner = step.big
        step = as_step(inner) if len(inner.users) == 1 and _dtype(inner) == _dtype(end) else None
    return steps[::-1]


def as_step(node: Node) -> Step | None:
    """``node`` as an affine step, or None."""
    if node.target not in STEPS or node.kwargs or _dtype(node) not in DTYPES:
        return None
    left, right = node.args[0], node.args[1]
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    orders = [(left, right)]
    if node.target in (ADD, MUL):
        orders.append((right, left))
    for big, coefficient in orders:
        if _same_shape(node, big) and not _is_small(node) and _is_coefficient(coefficient):
            return Step(node, big, coefficient)
    return None


def describe(steps: list[Step]) -> Chain:
    """The facts that the policy decides on."""
    value = steps[-1].node.meta["val"]
    sizes = [step.coefficient.meta["val"].numel() for step in steps]
    return Chain(
        elements=compat.size_hint(value.numel()) or 0,
        coefficients=max(sizes),
        steps=len(steps),
        inlined_ops=sum(
            len({n for n in _ancestors(step.coefficient) if n.target in ARITHMETIC})
            for step in steps
        ),
        device=value.device.type,
    )


def rewrite(graph: Graph, steps: list[Step]) -> None:
    """Insert the collapsed form behind the chain; the old nodes die once nothing uses them."""
    end = steps[-1].node
    with graph.inserting_before(end):
        emit = _emitter(graph, end.meta)
        center, scale, shift = _collapse(steps, end.meta["val"].dtype, emit)
        value = steps[0].big
        for target, coefficient in ((SUB, center), (MUL, scale), (ADD, shift)):
            if coefficient is not None:
                value = emit(target, value, _own_buffer(coefficient, emit))
    end.replace_all_uses_with(value)
    for step in reversed(steps):
        graph.erase_node(step.node)


def _collapse(
    steps: list[Step], dtype: torch.dtype, emit: Callable[..., Node]
) -> tuple[Node | None, Node | None, Node | None]:
    """Fold the steps into (center, scale, shift) of ``(x - center) * scale + shift``."""
    center: Node | None = None
    scale: Node | None = None
    shift: Node | None = None
    for step in steps:
        c, target = step.coefficient, step.node.target
        c = c if _dtype(c) == dtype else emit(CONVERT, c, dtype)
        if target in (MUL, DIV):
            scale = emit(target, scale, c) if scale else c if target is MUL else _inverse(c, emit)
            shift = emit(target, shift, c) if shift else None
        elif scale is None:  # before any scaling: the exact difference x - center
            if target is SUB:
                center = emit(ADD, center, c) if center else c
            else:
                center = emit(SUB, center, c) if center else emit(aten.neg.default, c)
        elif target is ADD:
            shift = emit(ADD, shift, c) if shift else c
        else:
            shift = emit(SUB, shift, c) if shift else emit(aten.neg.default, c)
    return center, scale, shift


def _inverse(c: Node, emit: Callable[..., Node]) -> Node:
    return emit(aten.reciprocal.default, c)


def _own_buffer(coefficient: Node, emit: Callable[..., Node]) -> Node:
    """A buffer for what has to be computed; an input, seen through views, has one already."""
    computed = any(n.target in ARITHMETIC for n in _ancestors(coefficient))
    return emit(materialise.overload(), coefficient) if computed else coefficient


def _emitter(graph: Graph, meta: dict[str, Any]) -> Callable[..., Node]:
    """``emit(target, *args)`` adds a call with the fake value that later passes read."""

    def emit(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        node.meta.update({k: v for k, v in meta.items() if k != "val"})
        node.meta["val"] = target(*values)
        return node

    return emit


def _is_coefficient(node: Node) -> bool:
    return _is_small(node) and all(
        n.op in ("placeholder", "get_attr") or n.target in ARITHMETIC or n.target in VIEWS
        for n in _ancestors(node)
    )


def _is_small(node: Node) -> bool:
    """Whether every size is known and at most one differs from 1: one value a channel."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
        return False
    return sum(size != 1 for size in value.shape) <= 1


def _ancestors(node: Node) -> set[Node]:
    found: set[Node] = set()
    todo = [node]
    while todo:
        if (each := todo.pop()) not in found:
            found.add(each)
            todo.extend(each.all_input_nodes)
    return found


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _same_shape(node: Node, big: Node) -> bool:
    """Equal expressions for every size: asking a symbol whether it is equal would add a guard."""
    left, right = node.meta.get("val"), big.meta.get("val")
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    return [str(size) for size in left.shape] == [str(size) for size in right.shape]
