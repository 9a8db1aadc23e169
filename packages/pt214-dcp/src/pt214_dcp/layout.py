"""Who holds which part of a tensor: pure arithmetic, no tensor, no I/O.

    mesh + placements + coordinate --local_boxes--> boxes held

A *box* is a rectangle of the global tensor. Placements apply from left to right, as in torch:
``Split(dim)`` cuts like ``torch.chunk``; ``Split(dim, parts)`` is torch's ``_StridedShard``: first
cut in ``parts``, cut each again over the mesh axis and take one of each, so that one rank may hold
several boxes of a tensor. ``plan.py`` says which of the holders writes a box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

Shape = tuple[int, ...]
Run = tuple[int, int]  # first index, count


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh axis cuts ``dim``; ``parts`` > 1 is torch's strided shard."""

    dim: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """Group ranks in a row-major array of ``shape``.

    One object serves every tensor over the same mesh: at thousands of ranks, to build, hash or
    search the list once a tensor would cost more than the rest of the planning.
    """

    shape: Shape
    ranks: Shape
    _places: dict[int, int] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(f"mesh of shape {self.shape} with {len(self.ranks)} ranks")
        places = {rank: place for place, rank in enumerate(self.ranks)}
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_hash", hash((self.shape, self.ranks)))

    def __hash__(self) -> int:
        return self._hash

    def at(self, coordinate: Shape) -> int:
        """The rank at ``coordinate``."""
        place = 0
        for at, size in zip(coordinate, self.shape, strict=True):
            place = place * size + at
        return self.ranks[place]

    def coordinate(self, rank: int) -> Shape | None:
        """Place of ``rank`` in the mesh; ``None`` for a rank outside it."""
        place = self._places.get(rank)
        if place is None:
            return None
        coordinate = []
        for size in reversed(self.shape):
            place, at = divmod(place, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor over a mesh; ``None`` in ``splits`` is an axis of replicas."""

    mesh: Mesh
    splits: tuple[Split | None, ...]

    @property
    def whole(self) -> bool:
        """Whether each rank of the mesh holds all of the tensor."""
        return not any(self.splits)


class Box(NamedTuple):
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


def whole_box(shape: Shape) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), shape)


class Item(NamedTuple):
    """What planning knows of one tensor.

    Attributes:
        key: path of the tensor.
        itemsize: bytes of one element.
        shape: of the global tensor.
        layout: who holds what.
        alias: index of an earlier item that is the very same tensor, such as a tied weight.
    """

    key: str
    itemsize: int
    shape: Shape
    layout: Layout
    alias: int | None = None


class Held(NamedTuple):
    """A box of the global tensor and where it lies in the rank's local tensor."""

    box: Box
    local: Box

    def narrow(self, dim: int, start: int, stop: int) -> Held:
        """Indices ``start`` to ``stop`` of ``dim``, counted within the box."""
        return Held(_narrow(self.box, dim, start, stop), _narrow(self.local, dim, start, stop))


def local_boxes(shape: Shape, layout: Layout, rank: int) -> list[Held]:
    """Boxes of the global tensor that ``rank`` holds, in the order of its local tensor."""
    coordinate = layout.mesh.coordinate(rank)
    if coordinate is None or 0 in shape:
        return []
    if layout.whole:
        return [Held(whole_box(shape), whole_box(shape))]
    per_dim: list[list[Run]] = [[(0, n)] for n in shape]
    for split, at, over in zip(layout.splits, coordinate, layout.mesh.shape, strict=True):
        if split is not None:
            per_dim[split.dim] = _take(per_dim[split.dim], split.parts, over, at)
    held = []
    for runs in product(*map(_with_local_start, per_dim)):
        size = tuple(count for _, count, _ in runs)
        box = Box(tuple(first for first, _, _ in runs), size)
        held.append(Held(box, Box(tuple(local for _, _, local in runs), size)))
    return held


def _narrow(box: Box, dim: int, start: int, stop: int) -> Box:
    begin, size = list(box.start), list(box.size)
    begin[dim] += start
    size[dim] = stop - start
    return Box(tuple(begin), tuple(size))


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


def _cut(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
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
