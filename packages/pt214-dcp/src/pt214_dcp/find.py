"""Which ranks wrote a box: asked of the layout and the plan first, of every manifest only then.

The plan is a pure function of the table, so a loader can run it for any saving rank. What it says
is a hint that saves reading thousands of manifests; that a box is covered is checked by counting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from pt214_dcp.checkpoint import Checkpoint
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.layout import Box, Layout, Shape, local_boxes
from pt214_dcp.manifest import Chunk, Manifest
from pt214_dcp.plan import Placed, placed


@dataclass(frozen=True, slots=True)
class Found:
    """A chunk that holds ``part`` of what was asked for."""

    manifest: Manifest
    chunk: Chunk
    part: Box


class Finder:
    """Looks for boxes of the tensors of one key group.

    Args:
        checkpoint: where.
        group: number of the key group.
        rank: whose manifest to look into first; a loader on the saving layout finds all there.
    """

    def __init__(self, checkpoint: Checkpoint, group: int, rank: int) -> None:
        self._checkpoint, self._group = checkpoint, group
        self._table = checkpoint.table(group)
        self._chunks: dict[int, dict[int, list[Chunk]]] = {}  # by rank, then by tensor
        self._placed: dict[int, dict[int, list[Placed]]] = {}  # by rank, then by tensor
        self._first = rank if rank < checkpoint.commit.world_size else None
        self._own: dict[int, Chunk] | None = None
        if self._first is not None and checkpoint.record(rank).group == group:
            self._manifest = checkpoint.manifest(rank)
            self._own = {chunk.tensor: chunk for chunk in self._manifest.chunks}

    def whole(self, key: str, dtype: torch.dtype) -> tuple[Manifest, Chunk] | None:
        """The one chunk of the first rank that is all of a tensor of ``dtype``, if there is one."""
        if self._own is None:
            return None
        number = self._table.index[key]
        record = self._table.tensors[number]
        chunk = self._own.get(self._table.home(number))
        if chunk is None or chunk.box.size != record.shape or record.dtype != dtype:
            return None
        return self._manifest, chunk

    def find(self, tensor: int, box: Box) -> list[Found]:
        """Chunks that together hold ``box``, each element once.

        Raises:
            ChunkCorrupt: they do not cover it.
        """
        tensor = self._table.home(tensor)
        found: list[Found] = []
        missing = box.numel
        looked: set[int] = set()
        for rank in self._candidates(tensor, box):
            if rank in looked:
                continue
            looked.add(rank)
            for chunk in self._chunks_of(rank).get(tensor, ()):
                part = box.overlap(chunk.box) if chunk.box != box else box
                if part is not None:
                    found.append(Found(self._checkpoint.manifest(rank), chunk, part))
                    missing -= part.numel
            if missing <= 0:
                break
        if missing:
            key = self._table.keys[tensor]
            raise ChunkCorrupt(
                f"{self._checkpoint.folder}: {key or 'shared bytes'}: chunks hold "
                f"{box.numel - missing} of the {box.numel} elements of {box}"
            )
        return found

    def _candidates(self, tensor: int, box: Box) -> Iterator[int]:
        if self._first is not None and self._checkpoint.record(self._first).group == self._group:
            yield self._first
        layout, shape = self._table.layouts[tensor], self._table.tensors[tensor].shape
        for coordinate in holders_of(shape, layout, box):
            for rank in self._writers(tensor, layout, coordinate):
                if self._in_group(rank):
                    yield rank
        yield from (rank for rank in layout.mesh.ranks if self._in_group(rank))

    def _in_group(self, rank: int) -> bool:
        return self._checkpoint.record(rank).group == self._group

    def _writers(self, tensor: int, layout: Layout, coordinate: Shape) -> Iterator[int]:
        """Of the replicas of the rank at ``coordinate``, those that wrote a part of a tensor."""
        rank = layout.mesh.at(coordinate)
        if rank not in self._placed:
            boxes: dict[int, list[Placed]] = {}
            for box in placed(self._table.items, rank):
                boxes.setdefault(box.tensor, []).append(box)
            self._placed[rank] = boxes
        for box in self._placed[rank].get(tensor, ()):
            for place in box.places():
                yield layout.mesh.at(_replica(layout, coordinate, place))

    def _chunks_of(self, rank: int) -> dict[int, list[Chunk]]:
        if rank not in self._chunks:
            known: dict[int, list[Chunk]] = {}
            for chunk in self._checkpoint.manifest(rank).chunks:
                known.setdefault(chunk.tensor, []).append(chunk)
            self._chunks[rank] = known
        return self._chunks[rank]


def holders_of(shape: Shape, layout: Layout, box: Box) -> Iterator[Shape]:
    """Coordinates whose part of a tensor overlaps ``box``; of replicas, only the first."""
    mesh = layout.mesh
    per_axis: list[range] = []
    dims = [split.dim for split in layout.splits if split is not None]
    for size, split in zip(mesh.shape, layout.splits, strict=True):
        choices = range(1) if split is None else range(size)
        # One plain cut of a dim: the pieces that overlap follow from division.
        if split is not None and split.parts == 1 and dims.count(split.dim) == 1:
            full = max(1, -(-shape[split.dim] // size))
            start = box.start[split.dim]
            stop = start + max(1, box.size[split.dim])
            choices = range(min(start // full, size - 1), min(-(-stop // full), size))
        per_axis.append(choices)
    for coordinate in product(*per_axis):
        helds = local_boxes(shape, layout, mesh.at(coordinate))
        if any(held.box.overlap(box) for held in helds):
            yield coordinate


def _replica(layout: Layout, coordinate: Shape, place: int) -> Shape:
    """Coordinate of replica ``place`` of the replica set of ``coordinate``."""
    found = list(coordinate)
    axes = [axis for axis, split in enumerate(layout.splits) if split is None]
    for axis in reversed(axes):
        place, found[axis] = divmod(place, layout.mesh.shape[axis])
    return tuple(found)
