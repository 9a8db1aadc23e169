"""Read a checkpoint without a state dict to fill: whole, or tensor by tensor."""

from __future__ import annotations

from typing import Any

import torch

from pt214_dcp import state, trees
from pt214_dcp.checkpoint import Checkpoint, open_checkpoint
from pt214_dcp.data_files import DataFiles
from pt214_dcp.find import Finder
from pt214_dcp.layout import Box, whole_box
from pt214_dcp.loader import plan_box
from pt214_dcp.reads import Reads

__all__ = ["Checkpoint", "build", "open_checkpoint", "read_tensor"]


def read_tensor(checkpoint: Checkpoint, key: str, box: Box | None = None) -> torch.Tensor:
    """The tensor ``key``, or the part ``box`` of it, on the CPU; every block is checked.

    Raises:
        KeyError: the checkpoint has no such tensor.
        ChunkCorrupt: stored bytes are wrong, or do not cover the part.
    """
    record = checkpoint.tensors[key]
    part = box or whole_box(record.shape)
    tensor = torch.empty(part.size, dtype=record.dtype)
    if 0 in part.size:
        return tensor
    group = next(at for at, table in enumerate(checkpoint.tables) if key in table.index)
    with DataFiles(checkpoint) as data:
        reads = Reads(data)
        finder = Finder(checkpoint, group, 0)
        plan_box(checkpoint.table(group), finder, key, part, tensor, reads)
        reads.run()
    return tensor


def build(checkpoint: Checkpoint, group: int = 0) -> Any:
    """The state dict of a key group, with new tensors; what is ``PerRank`` is left as None."""
    table = checkpoint.table(group)
    tensors = [read_tensor(checkpoint, key) if key else None for key in table.keys]
    own = [None] * len(trees.per_rank_numbers(table.tree))
    return state.build(table.tree, tensors, own)
