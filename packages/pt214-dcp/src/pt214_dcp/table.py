"""The table of one key group: nesting, values, and what every tensor is and where it lay.

    path/gen-<uuid>/table-00000

One rank of each group writes it; all others would write the same bytes. Ranks whose state has other
keys, such as the stages of a pipeline, are another group with a table of its own. Numbers of many
tensors are columns of bytes, since 20,000 small msgpack lists cost more than the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import torch

from pt214_dcp import columns
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.layout import Item, Layout, Mesh, Shape, Split
from pt214_dcp.trees import Json, checked, kinds, per_rank_numbers

_MAX_DIMS = 64  # of a tensor; torch's own limit
_NO_ALIAS = -1


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that is a strided view of the bytes of another one (a *span*).

    Attributes:
        span: index of that tensor.
        offset: of the view's first element, in elements.
        strides: in elements.
    """

    span: int
    offset: int
    strides: Shape


class TensorRecord(NamedTuple):
    """Global shape and dtype of a tensor."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True)
class Table:
    """What all ranks of a key group know.

    Attributes:
        tree: nesting and values of the state dict.
        keys: path of each tensor; a span's is empty.
        tensors: what each is.
        layouts: who held what of each.
        aliases: index of the earlier tensor that each is the same as, or None.
        views: index of a tensor -> the view that it is.
        known_kinds: ``kinds``, where whoever made the table has walked the tree already.
    """

    tree: Json
    keys: tuple[str, ...]
    tensors: tuple[TensorRecord, ...]
    layouts: tuple[Layout, ...]
    aliases: tuple[int | None, ...]
    views: dict[int, View]
    known_kinds: dict[str, str] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def index(self) -> dict[str, int]:
        """Number of each key."""
        return {key: at for at, key in enumerate(self.keys) if key}

    def home(self, tensor: int) -> int:
        """The tensor that ``tensor`` is the same as, or itself; its bytes may lie in a span."""
        alias = self.aliases[tensor]
        return tensor if alias is None else alias

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Path of each leaf and container -> its kind."""
        return kinds(self.tree) if self.known_kinds is None else self.known_kinds

    @cached_property
    def per_rank(self) -> dict[str, int]:
        """Path of each ``PerRank`` -> its number."""
        return per_rank_numbers(self.tree) if "PerRank" in self.kinds.values() else {}

    @cached_property
    def items(self) -> list[Item]:
        """What planning needs of each tensor; views are never planned."""
        rows = zip(self.keys, self.tensors, self.layouts, self.aliases, strict=True)
        return [
            Item(
                key, record.dtype.itemsize, record.shape, layout, at if at in self.views else alias
            )
            for at, (key, record, layout, alias) in enumerate(rows)
        ]


def table_name(group: int) -> str:
    """File name of a group's table in its generation."""
    return f"table-{group:05d}"


def pack_table(table: Table) -> bytes:
    """Bytes of a table."""
    dtypes = list(dict.fromkeys(record.dtype for record in table.tensors))
    dtype_at = {dtype: at for at, dtype in enumerate(dtypes)}
    layouts, layout = _distinct(table.layouts)
    meshes = list(dict.fromkeys(layout.mesh for layout in layouts))
    shapes = [record.shape for record in table.tensors]
    return msgspec.msgpack.encode(
        {
            "tree": table.tree,
            "keys": table.keys,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
            "dtype": columns.pack("H", [dtype_at[record.dtype] for record in table.tensors]),
            "ndim": columns.pack("B", map(len, shapes)),
            "shape": columns.pack("q", [n for shape in shapes for n in shape]),
            "meshes": [[mesh.shape, _short(mesh.ranks)] for mesh in meshes],
            "layouts": [
                [meshes.index(layout.mesh), [_split(split) for split in layout.splits]]
                for layout in layouts
            ],
            "layout": layout,
            "alias": columns.pack(
                "q", [_NO_ALIAS if alias is None else alias for alias in table.aliases]
            ),
            "views": [[at, v.span, v.offset, v.strides] for at, v in table.views.items()],
        }
    )


def _distinct(layouts: Sequence[Layout]) -> tuple[list[Layout], bytes]:
    """The different ones, and the number of each; by identity first, since to hash one is slow."""
    known: dict[Layout, int] = {}
    seen: dict[int, int] = {}
    numbers = []
    for layout in layouts:
        at = seen.get(id(layout))
        if at is None:
            at = seen[id(layout)] = known.setdefault(layout, len(known))
        numbers.append(at)
    return list(known), columns.pack("I", numbers)


def unpack_table(data: bytes, where: str, world_size: int) -> Table:
    """Inverse of ``pack_table``; the caller has checked the digest.

    Raises:
        ChunkCorrupt: it claims what can't be.
    """
    try:
        return _parse(msgspec.msgpack.decode(data), world_size)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError,
            AttributeError, IndexError, OverflowError, MemoryError) as error:  # fmt: skip
        # MemoryError: of a list that claims to be long, before its first item is looked at.
        raise ChunkCorrupt(f"{where}: a field is missing or malformed: {error}") from error


def _parse(body: dict[str, Any], world_size: int) -> Table:
    keys = tuple(map(_text, body["keys"]))
    dtypes = [dtype_of(name) for name in body["dtypes"]]
    shapes = unpack_shapes(body["ndim"], body["shape"])
    tensors = tuple(
        TensorRecord(dtypes[code], shape)
        for code, shape in zip(columns.unpack("H", body["dtype"]), shapes, strict=True)
    )
    meshes = [Mesh(_shape(shape), _long(ranks, world_size)) for shape, ranks in body["meshes"]]
    placed = [_layout(meshes[mesh], splits) for mesh, splits in body["layouts"]]
    layouts = tuple(placed[at] for at in columns.unpack("I", body["layout"]))
    aliases = tuple(None if at == _NO_ALIAS else at for at in columns.unpack("q", body["alias"]))
    views = {at: View(span, offset, _shape(strides)) for at, span, offset, strides in body["views"]}
    if len({len(keys), len(tensors), len(layouts), len(aliases)}) > 1:
        raise ValueError(f"{len(keys)} keys, {len(tensors)} tensors, {len(layouts)} layouts")
    known = checked(body["tree"], len(tensors))
    table = Table(body["tree"], keys, tensors, layouts, aliases, views, known)
    _check(table)
    return table


def _check(table: Table) -> None:
    named = {path for path, kind in table.kinds.items() if kind in ("tensor", "numpy")}
    if named != table.index.keys():
        some = sorted(named ^ table.index.keys())[:5]
        raise ValueError(f"tensors of the tree and of the table differ: {some}")
    if sorted(table.per_rank.values()) != list(range(len(table.per_rank))):
        raise ValueError(f"numbers of PerRank are {sorted(table.per_rank.values())}")
    for at, alias in enumerate(table.aliases):
        if alias is not None and not (
            0 <= alias < at and table.tensors[alias] == table.tensors[at]
        ):
            raise ValueError(f"{table.keys[at]} is no alias of tensor {alias}")
    for at, layout in enumerate(table.layouts):
        for split in layout.splits:
            if split is not None and not 0 <= split.dim < len(table.tensors[at].shape):
                raise ValueError(f"{table.keys[at]} has no dim {split.dim} to split")
    for at, view in table.views.items():
        record, span = table.tensors[at], table.tensors[view.span]
        last = sum((n - 1) * s for n, s in zip(record.shape, view.strides, strict=True))
        room = math.prod(span.shape) * span.dtype.itemsize // record.dtype.itemsize
        inside = view.offset >= 0 and view.offset + last < room
        if table.keys[view.span] or not (inside or 0 in record.shape):
            raise ValueError(f"{table.keys[at]} lies outside the bytes that it is a view of")


def unpack_shapes(ndim: Any, sizes: Any) -> list[Shape]:
    """Shapes out of a column of their lengths and one of all their numbers.

    Raises:
        ValueError: negative numbers, or more or fewer than the lengths say.
    """
    lengths, flat = columns.unpack("B", ndim), columns.unpack("q", sizes)
    if max(lengths, default=0) > _MAX_DIMS:
        raise ValueError(f"a tensor with {max(lengths)} dims; at most {_MAX_DIMS}")
    if min(flat, default=0) < 0 or sum(lengths) != len(flat):
        raise ValueError(f"{len(flat)} numbers for shapes of {sum(lengths)} dims")
    at, shapes = 0, []
    for length in lengths:
        shapes.append(tuple(flat[at : at + length]))
        at += length
    return shapes


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls ``name``.

    Raises:
        ValueError: this torch has none of that name.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _short(ranks: Sequence[int]) -> Any:
    """First and count of consecutive ranks, which is what most meshes have; else a column."""
    first = ranks[0] if ranks else 0
    if tuple(ranks) == tuple(range(first, first + len(ranks))):
        return [first, len(ranks)]
    return columns.pack("I", ranks)


def _long(ranks: Any, world_size: int) -> Shape:
    if isinstance(ranks, bytes):
        found: Sequence[int] = columns.unpack("I", ranks)
    else:
        first, count = ranks
        found = range(first, first + count)
    # Before a tuple is made of it: a range of any length costs nothing.
    if len(found) > world_size or not all(
        0 <= end < world_size for end in (*found[:1], *found[-1:])
    ):
        raise ValueError(f"a mesh of {len(found)} ranks in a world of {world_size}")
    return tuple(found)


def _split(split: Split | None) -> Any:
    return None if split is None else [split.dim, split.parts]


def _layout(mesh: Mesh, splits: Any) -> Layout:
    found = tuple(
        None if split is None else Split(int(split[0]), int(split[1])) for split in splits
    )
    if len(found) != len(mesh.shape) or any(split and split.parts < 1 for split in found):
        raise ValueError(f"placements {splits!r} over a mesh of {len(mesh.shape)} axes")
    return Layout(mesh, found)


def _shape(values: Any) -> Shape:
    if any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"not a shape: {values!r}")
    return tuple(values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not the path of a key: {value!r}")
    return value
