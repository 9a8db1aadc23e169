"""Does a checkpoint fit the state dict to fill? Compared before a byte is written, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pt214_dcp.checkpoint import Checkpoint
from pt214_dcp.state import Flat, Leaf
from pt214_dcp.table import TensorRecord


@dataclass(slots=True)
class Fit:
    """How a state dict and a checkpoint compare.

    Attributes:
        missing: keys of the state dict that the checkpoint lacks.
        different: ``"key: checkpoint has ..., state dict has ..."``.
        cast: keys whose dtype differs, if values may be cast.
        groups: key groups that hold what the state dict wants, the rank's own first.
        home: key -> the group that serves it.
        used: group -> the keys of it that the state dict has.
    """

    missing: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    home: dict[str, int] = field(default_factory=dict)
    used: dict[int, set[str]] = field(default_factory=dict)


def fit(checkpoint: Checkpoint, flat: Flat, rank: int, *, cast: bool) -> Fit:
    """Compare; ``rank`` looks first into the group that the same rank saved.

    Args:
        checkpoint: what there is.
        flat: the state dict to fill.
        rank: of the loader.
        cast: whether another dtype is no difference.
    """
    found = Fit()
    wanted = flat.kinds
    for group in _order(checkpoint, rank):
        theirs = checkpoint.table(group).kinds
        if not found.used and theirs == wanted:  # at once: most loads are of what was saved
            found.groups, found.used = [group], {group: set(wanted)}
            found.home = dict.fromkeys(wanted, group)
            break
        new = wanted.keys() & theirs.keys()
        found.used[group] = set(new)
        fresh = [key for key in new if key not in found.home]
        if fresh:
            found.groups.append(group)
        for key in fresh:
            found.home[key] = group
            if theirs[key] != wanted[key]:
                found.different.append(
                    f"{key}: checkpoint has a {theirs[key]}, state dict has a {wanted[key]}"
                )
        if len(found.home) == len(wanted):
            break
    found.missing = [key for key in wanted if key not in found.home]
    for leaf in flat.leaves:
        if leaf.key in found.home:
            table = checkpoint.table(found.home[leaf.key])
            at = table.index.get(leaf.key)
            if at is not None and _differs(leaf.tensor, table.tensors[at]):
                compare(found, leaf, table.tensors[at], cast=cast)
        if not leaf.tensor.is_contiguous() and _expanded(leaf.tensor):
            found.different.append(
                f"{leaf.key}: state dict has an expanded tensor (strides {leaf.tensor.stride()}), "
                "whose elements share memory and can't be filled; give it a clone()"
            )
    found.different.sort()
    return found


def _differs(tensor: torch.Tensor, record: TensorRecord) -> bool:
    return tensor.shape != record.shape or tensor.dtype != record.dtype


def _expanded(tensor: torch.Tensor) -> bool:
    rows = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in rows)


def compare(found: Fit, leaf: Leaf, record: TensorRecord, *, cast: bool) -> None:
    """Note what differs between a tensor to fill and the one stored."""
    shape, dtype = leaf.tensor.shape, leaf.tensor.dtype
    if shape != record.shape:
        found.different.append(
            f"{leaf.key}: checkpoint has shape {record.shape}, state dict has {tuple(shape)}"
        )
    if dtype != record.dtype:
        if cast:
            found.cast.append(leaf.key)
        else:
            found.different.append(
                f"{leaf.key}: checkpoint has dtype {record.dtype}, state dict has {dtype}; "
                "cast=True converts it"
            )


def unexpected(checkpoint: Checkpoint, group: int, used: set[str]) -> list[str]:
    """Keys of a group that no state dict has; containers only where nothing below them is named."""
    theirs = checkpoint.table(group).kinds
    return [key for key in theirs if key not in used]


def bitmap(keys: Sequence[str], used: set[str]) -> bytes:
    """One bit a key, set where it is used."""
    bits = bytearray(-(-len(keys) // 8))
    for at, key in enumerate(keys):
        if key in used:
            bits[at // 8] |= 1 << at % 8
    return bytes(bits)


def _order(checkpoint: Checkpoint, rank: int) -> list[int]:
    groups = list(range(len(checkpoint.commit.tables)))
    if rank < checkpoint.commit.world_size and len(groups) > 1:
        own = checkpoint.record(rank).group
        groups.remove(own)
        groups.insert(0, own)
    return groups
