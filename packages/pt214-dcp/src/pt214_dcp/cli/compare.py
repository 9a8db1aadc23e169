"""``verify`` and ``diff``: is it whole, and is it the same?"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.cli.answer import Answer, Command, Status, path_argument, shown
from pt214_dcp.contents import Stored, contents
from pt214_dcp.staging import bits
from pt214_dcp.verifier import verify


def run_verify(arguments: argparse.Namespace) -> Answer:
    """Every checksum."""
    with shown(arguments, "verify") as told:
        found = verify(arguments.path, raises=False, progress=told)
    facts = {
        "tensors": found.tensors, "size_bytes": found.size_bytes, "errors": list(found.errors)
    }  # fmt: skip
    told = f"{found.tensors} tensors, {found.size_bytes} bytes, {len(found.errors)} damaged blocks"
    return Answer(facts, [told, *found.errors], Status.FOUND if found.errors else Status.WELL)


def run_diff(arguments: argparse.Namespace) -> Answer:
    """Keys, kinds and values of two checkpoints."""
    a, b = (contents(open_checkpoint(path.absolute())) for path in (arguments.a, arguments.b))
    lines, different = [], []
    for name, ours, theirs in (("only in A", a, b), ("only in B", b, a)):
        lines += [f"{name}: {key}" for key in ours.tensors if key not in theirs.tensors]
    for key in sorted(a.texts.keys() | b.texts.keys()):
        pair = [side.texts.get(key, "nothing") for side in (a, b)]
        if pair[0] != pair[1]:
            lines.append(f"{key}: {pair[0]} in A, {pair[1]} in B")
    common = [key for key in a.tensors if key in b.tensors]
    with shown(arguments, "diff") as told:
        for at, key in enumerate(common):
            found = _difference(a.tensors[key], b.tensors[key])
            if found:
                different.append({"key": key, **found})
                lines.append(f"{key}: " + ", ".join(f"{k} {v}" for k, v in found.items()))
            if told is not None:
                told(at + 1, len(common))
    facts = {"same": not lines, "differences": lines, "tensors": different}
    status = Status.FOUND if lines else Status.WELL
    return Answer(facts, lines or ["no difference"], status)


def _difference(a: Stored, b: Stored) -> dict[str, Any]:
    """What differs between the two tensors, or nothing."""
    if (a.kind, a.record) != (b.kind, b.record):
        return {
            side: f"{each.kind} of {each.record.dtype} and {each.record.shape}"
            for side, each in (("A", a), ("B", b))
        }
    left, right = a.read(), b.read()
    unequal = bits(left) != bits(right)
    count = int(unequal.sum())
    if not count:
        return {}
    first = unequal.nonzero()[0].tolist() if unequal.dim() else []
    found: dict[str, Any] = {"unequal_elements": count, "first_index": first}
    return found | _distance(left[unequal], right[unequal])


def _distance(left: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """How far apart elements are that differ; equal ones, such as a mask's -inf, are no part."""
    if left.dtype == torch.bool:
        return {}
    wide = torch.complex128 if left.dtype.is_complex else torch.float64
    gap = (left.to(wide) - right.to(wide)).abs()
    if not (left.dtype.is_floating_point or left.dtype.is_complex):
        at = int(gap.argmax())  # in float64, since int64 wraps; the answer itself is exact
        return {"max_absolute": abs(int(left[at]) - int(right[at]))}
    scale = torch.maximum(left.to(wide).abs(), right.to(wide).abs())
    relative = gap / scale.clamp(min=1e-300)
    return {"max_absolute": float(gap.max()), "max_relative": float(relative.max())}


def _add_diff(parser: argparse.ArgumentParser) -> None:
    path_argument(parser, "a", "folder of a checkpoint")
    path_argument(parser, "b", "folder of another")


VERIFY = Command("check every checksum", path_argument, run_verify)
DIFF = Command("compare two checkpoints", _add_diff, run_diff)
