"""Who holds which part of a tensor, and who writes it: pure arithmetic, no tensor, no I/O.

    mesh + placements + coordinate --local_boxes--> boxes held --plan--> boxes written

A *box* is a rectangle of the global tensor. Placements apply from left to right, as in torch:
``Split(dim)`` cuts like ``torch.chunk``; ``Split(dim, parts)`` is torch's ``_StridedShard``: first
cut in ``parts``, cut each again over the mesh axis and take one of each, so that one rank may hold
several boxes of a tensor. A box that several ranks hold is divided among them; a small one has one
writer, the one with the least to write so far. Every rank computes the same answer from the same
items, so nobody has to be asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

Shape = tuple[int, ...]
Run = tuple[int, int]  # first index, count

# A box held more than once has one writer below this size: small tensors stay whole. Not tuned.
DIVIDE_FROM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis cuts ``dim``; ``parts`` > 1 is torch's strided shard."""

    dim: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor over a mesh of group ranks (row-major); ``None`` in ``splits`` is a replica axis."""

    mesh_shape: Shape
    ranks: Shape
    splits: tuple[Split | None, ...]

    def coordinate(self, rank: int) -> Shape | None:
        """Place of ``rank`` in the mesh; ``None`` for a rank outside it."""
        if rank not in self.ranks:
            return None
        place, coordinate = self.ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            place, at = divmod(place, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))


@dataclass(frozen=True, slots=True)
class Box:
    """``size`` elements from ``start`` in each dim of the global tensor."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for a 0-d tensor."""
        return math.prod(self.size)

    def overlap(self, other: Box) -> Box | None:
        """The rectangle both hold, or ``None``."""
        start = tuple(map(max, self.start, other.start))
        stop = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(end - begin for begin, end in zip(start, stop, strict=True))
        return None if any(n <= 0 for n in size) else Box(start, size)

    def inside(self, other: Box) -> tuple[slice, ...]:
        """Slices that cut this box out of ``other``."""
        pairs = zip(self.start, other.start, self.size, strict=True)
        return tuple(slice(a - b, a - b + n) for a, b, n in pairs)


@dataclass(frozen=True, slots=True)
class Item:
    """What the plan knows of one tensor."""

    key: str
    itemsize: int
    shape: Shape
    layout: Layout


@dataclass(frozen=True, slots=True)
class Held:
    """A box of the global tensor and where it lies in the rank's local tensor."""

    box: Box
    local: Box


def local_boxes(shape: Shape, layout: Layout, rank: int) -> list[Held]:
    """Boxes of the global tensor that ``rank`` holds, in the order of its local tensor."""
    coordinate = layout.coordinate(rank)
    if coordinate is None or 0 in shape:
        return []
    per_dim: list[list[Run]] = [[(0, n)] for n in shape]
    for split, at, over in zip(layout.splits, coordinate, layout.mesh_shape, strict=True):
        if split is not None:
            per_dim[split.dim] = _take(per_dim[split.dim], split.parts, over, at)
    held = []
    for runs in product(*map(_with_local_start, per_dim)):
        size = tuple(count for _, count, _ in runs)
        box = Box(tuple(first for first, _, _ in runs), size)
        held.append(Held(box, Box(tuple(local for _, _, local in runs), size)))
    return held


def plan(items: Sequence[Item], rank: int) -> list[tuple[int, Held]]:
    """``(index of the item, part of it)`` that ``rank`` writes, the same rule on every rank.

    Args:
        items: all tensors, in an order that is the same on all ranks.
        rank: rank in the group that saves.
    """
    loads: dict[Shape, list[int]] = {}  # bytes given so far to each replica of one replica set
    mine = []
    for index, item in enumerate(items):
        coordinate = item.layout.coordinate(rank)
        if coordinate is None:
            continue
        peers = _replicas(item.layout, coordinate)
        load = loads.setdefault(peers, [0] * len(peers))
        me = peers.index(rank)
        for held in local_boxes(item.shape, item.layout, rank):
            for owner, part in _divide(held, item.itemsize, load):
                if owner == me:
                    mine.append((index, part))
    return mine


def _divide(held: Held, itemsize: int, load: list[int]) -> Iterator[tuple[int, Held]]:
    """Cut ``held`` among its replicas, or give it to the least loaded one."""
    size_bytes = held.box.numel * itemsize
    if len(load) == 1 or size_bytes < DIVIDE_FROM_BYTES or not held.box.size:
        owner = load.index(min(load))
        load[owner] += size_bytes
        yield owner, held
        return
    size = held.box.size
    dim = next((d for d, n in enumerate(size) if n >= len(load)), size.index(max(size)))
    for owner in range(len(load)):
        start, stop = (size[dim] * i // len(load) for i in (owner, owner + 1))
        if stop > start:
            part = Held(_narrow(held.box, dim, start, stop), _narrow(held.local, dim, start, stop))
            load[owner] += part.box.numel * itemsize
            yield owner, part


def _narrow(box: Box, dim: int, start: int, stop: int) -> Box:
    begin, size = list(box.start), list(box.size)
    begin[dim] += start
    size[dim] = stop - start
    return Box(tuple(begin), tuple(size))


def _replicas(layout: Layout, coordinate: Shape) -> Shape:
    """Ranks that hold the same boxes as the rank at ``coordinate``, itself included."""
    axes = [
        range(size) if split is None else (at,)
        for size, split, at in zip(layout.mesh_shape, layout.splits, coordinate, strict=True)
    ]
    found = []
    for place in product(*axes):
        flat = 0
        for at, size in zip(place, layout.mesh_shape, strict=True):
            flat = flat * size + at
        found.append(layout.ranks[flat])
    return tuple(found)


def _take(runs: list[Run], parts: int, over: int, at: int) -> list[Run]:
    """Cut the indices named by ``runs`` as one mesh axis does, and keep the piece ``at``."""
    total = sum(count for _, count in runs)
    kept: list[Run] = []
    for start, stop in _chunks(total, parts):
        first, last = _chunk(stop - start, over, at)
        for run in _cut(runs, start + first, start + last):
            if kept and sum(kept[-1]) == run[0]:
                kept[-1] = (kept[-1][0], kept[-1][1] + run[1])
            else:
                kept.append(run)
    return kept


def _chunks(total: int, parts: int) -> Iterator[Run]:
    return (_chunk(total, parts, at) for at in range(parts))


def _chunk(total: int, parts: int, at: int) -> tuple[int, int]:
    """Start and stop of piece ``at`` of ``torch.chunk``, which may be empty."""
    full = -(-total // parts)
    return min(total, full * at), min(total, full * (at + 1))


def _cut(runs: list[Run], start: int, stop: int) -> Iterator[Run]:
    """Global runs of the positions ``start`` to ``stop`` of a local index list."""
    at = 0
    for first, count in runs:
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            yield first + low - at, high - low
        at += count


def _with_local_start(runs: list[Run]) -> list[tuple[int, int, int]]:
    at, result = 0, []
    for first, count in runs:
        result.append((first, count, at))
        at += count
    return result
