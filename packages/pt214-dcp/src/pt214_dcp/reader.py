"""Read a checkpoint without a state dict to fill: whole, or tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch

from pt214_dcp import state
from pt214_dcp.checkpoint import Checkpoint, open_checkpoint
from pt214_dcp.data_files import DataFiles
from pt214_dcp.errors import LoadFailed
from pt214_dcp.find import Finder
from pt214_dcp.layout import Box, whole_box
from pt214_dcp.loader import plan_box
from pt214_dcp.reads import Reads
from pt214_dcp.stores.resolve import PathLike, where

__all__ = ["Checkpoint", "build", "open_checkpoint", "read", "read_tensor"]


def read_tensor(checkpoint: Checkpoint, key: str, box: Box | None = None) -> torch.Tensor:
    """The tensor ``key``, or the part ``box`` of it, on the CPU; every block is checked.

    Raises:
        KeyError: the checkpoint has no such tensor.
        ChunkCorrupt: stored bytes are wrong, or do not cover the part.
    """
    record = checkpoint.tensors[key]
    part = box or whole_box(record.shape)
    if 0 in part.size:
        return torch.empty(part.size, dtype=record.dtype)
    group = next(at for at, table in enumerate(checkpoint.tables) if key in table.index)
    table = checkpoint.table(group)
    with DataFiles(checkpoint) as data:
        reads = Reads(data)
        finder = Finder(checkpoint, group, 0)
        if table.home(table.index[key]) not in table.views:
            finder.find(table.index[key], part)  # a lie of its size is met before memory is taken
        tensor = torch.empty(part.size, dtype=record.dtype)
        plan_box(table, finder, key, part, tensor, reads)
        reads.run()
    return tensor


def read(path: PathLike) -> Any:
    """The whole state dict of a checkpoint, with new tensors on the CPU; nothing is filled.

    Tied weights are tied again. Every block is checked.

    Args:
        path: folder, URL or place in a store, as for ``load``.

    Raises:
        NotACheckpoint: nothing is committed there.
        LoadFailed: it has several key groups, or values that are each rank's own.
        ChunkCorrupt: stored bytes are wrong.

    >>> import tempfile, torch, pt214_dcp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     done = pt214_dcp.save({"w": torch.ones(2), "step": 3}, folder)
    ...     pt214_dcp.read(folder)
    {'step': 3, 'w': tensor([1., 1.])}
    """
    return build(open_checkpoint(where(path)))


def build(checkpoint: Checkpoint) -> Any:
    """As ``read``, of an opened checkpoint."""
    if len(checkpoint.commit.tables) > 1:
        raise LoadFailed(
            f"{checkpoint.path}: {len(checkpoint.commit.tables)} key groups, so no state dict is "
            "the whole; load each part with pt214_dcp.load"
        )
    table = checkpoint.table(0)
    if table.per_rank:
        raise LoadFailed(
            f"{checkpoint.path}: PerRank values, which only pt214_dcp.load reads: "
            f"{', '.join(list(table.per_rank)[:5])}"
        )
    tensors: list[torch.Tensor | None] = []
    for key, alias in zip(table.keys, table.aliases, strict=True):
        if alias is not None:
            tensors.append(tensors[alias])
        else:
            tensors.append(read_tensor(checkpoint, key) if key else None)
    return state.build(table.tree, tensors)
