"""Who writes what, with nobody asked: every rank computes the same answer from its own items.

All boxes that the same ranks hold (a *replica set*) are laid end to end on one line of bytes, and
the line is cut into as many equal pieces as there are replicas:

    line of the set   |  w0  | b0|        w1         |b1|    w2    |
    replica           |------0------|------1------|------2------|

A big box is cut where the line is cut, rounded to whole rows; a small one stays whole and goes to
the replica in whose piece it begins. A rank finds its own piece by arithmetic alone, so the cost
is one pass over its own items, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pt214_dcp.layout import Held, Item, Layout, Mesh, Shape, local_boxes

# A box held more than once has one writer below this size: small tensors stay whole. Not tuned.
DIVIDE_FROM_BYTES = 1 << 20


@dataclass(slots=True)
class Line:
    """The bytes that one replica set holds, and this rank's place among the replicas."""

    replicas: int
    place: int
    size_bytes: int = 0

    @property
    def mine(self) -> tuple[int, int]:
        """First byte of this rank's piece, and one past its last."""
        return self._start(self.place), self._start(self.place + 1)

    def place_of(self, at: int) -> int:
        """The replica whose piece holds byte ``at``; the last one for the end of the line."""
        place = min(self.replicas - 1, at * self.replicas // max(1, self.size_bytes))
        while place and self._start(place) > at:
            place -= 1
        while place < self.replicas - 1 and self._start(place + 1) <= at:
            place += 1
        return place

    def _start(self, place: int) -> int:
        return self.size_bytes * place // self.replicas


class Placed(NamedTuple):
    """A box that a rank holds, and where it lies on the line of its replica set."""

    tensor: int
    held: Held
    line: Line
    at: int
    size_bytes: int

    def places(self) -> range:
        """Replicas that may write a part of it, by their number in the set."""
        line = self.line
        if line.replicas == 1:
            return range(1)
        whole = self.size_bytes < DIVIDE_FROM_BYTES
        return range(
            line.place_of(self.at), line.place_of(self.at + self.size_bytes * (not whole)) + 1
        )


def placed(items: Sequence[Item], rank: int) -> list[Placed]:
    """All boxes that ``rank`` holds, on their lines.

    Args:
        items: all tensors, in an order that is the same on all ranks that hold them.
        rank: rank in the group that saves.
    """
    lines: dict[_SetKey, Line] = {}
    # Shapes and layouts repeat from layer to layer; what follows from them is worked out once.
    boxes: dict[tuple[Shape, int], tuple[Line, list[Held]] | None] = {}
    found = []
    for index, item in enumerate(items):
        if item.alias is not None:
            continue
        seen = (item.shape, id(item.layout))
        if seen not in boxes:
            boxes[seen] = _boxes(item, rank, lines)
        known = boxes[seen]
        if known is None:
            continue
        line, helds = known
        for held in helds:
            size_bytes = held.box.numel * item.itemsize
            found.append(Placed(index, held, line, line.size_bytes, size_bytes))
            line.size_bytes += size_bytes
    return found


def plan(items: Sequence[Item], rank: int) -> list[tuple[int, Held]]:
    """``(index of the item, part of it)`` that ``rank`` writes; arguments as ``placed``."""
    return [(box.tensor, part) for box in placed(items, rank) for part in _mine(box)]


_SetKey = tuple[Mesh, tuple[int | None, ...]]


def _boxes(item: Item, rank: int, lines: dict[_SetKey, Line]) -> tuple[Line, list[Held]] | None:
    coordinate = item.layout.mesh.coordinate(rank)
    if coordinate is None:
        return None
    key, replicas, place = replica_set(item.layout, coordinate)
    line = lines.setdefault(key, Line(replicas, place))
    return line, local_boxes(item.shape, item.layout, rank)


def replica_set(layout: Layout, coordinate: Shape) -> tuple[_SetKey, int, int]:
    """Name of the set of ranks that hold the same boxes, how many they are, and which is this."""
    replicas, place, fixed = 1, 0, []
    for split, at, size in zip(layout.splits, coordinate, layout.mesh.shape, strict=True):
        if split is None:
            replicas, place = replicas * size, place * size + at
        fixed.append(None if split is None else at)
    return (layout.mesh, tuple(fixed)), replicas, place


def _mine(box: Placed) -> Iterator[Held]:
    held, line = box.held, box.line
    if line.replicas == 1:
        yield held
    elif box.size_bytes < DIVIDE_FROM_BYTES:
        if line.place_of(box.at) == line.place:
            yield held
    else:
        low, high = line.mine
        dim = _dim_to_cut(held.box.size, line.replicas)
        rows = held.box.size[dim]
        start = _row(low - box.at, box.size_bytes, rows)
        stop = _row(high - box.at, box.size_bytes, rows)
        if start < stop:
            yield held.narrow(dim, start, stop)


def _row(at: int, size_bytes: int, rows: int) -> int:
    """The cut of a line at byte ``at`` of a box, rounded up to a row; each cut has one answer."""
    return min(rows, max(0, -(-at * rows // size_bytes)))


def _dim_to_cut(size: Shape, replicas: int) -> int:
    """The first dim with a row for each replica, since its rows are the longest runs of bytes."""
    return next((dim for dim, n in enumerate(size) if n >= replicas), size.index(max(size)))
