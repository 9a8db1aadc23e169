"""What one rank knows of the state it saves, before it has asked anybody.

    state dict -> tree, tensors, layouts, aliases, spans -> digests that ranks compare

Tied weights are one tensor with two keys: the second is an *alias*. Views that share bytes in any
other way are written as one *span* of bytes, of which each is a strided view.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import torch

from pt214_dcp import columns
from pt214_dcp.agree import Replica
from pt214_dcp.compat import Layouts, local_tensor
from pt214_dcp.garbage import uncollected
from pt214_dcp.layout import Layout, Mesh
from pt214_dcp.plan import replica_set
from pt214_dcp.staging import content_hash
from pt214_dcp.state import PLAIN, Flat, take_apart
from pt214_dcp.table import Table, TensorRecord, View


@dataclass(frozen=True)
class Structure:
    """One rank's state, taken apart.

    Attributes:
        flat: tree, and what is this rank's own.
        keys: path of each tensor; "" for a span.
        tensors: those of the state dict, then the spans.
        records: dtype and global shape of each.
        layouts: of each; None for a plain tensor, which all ranks of the key group hold.
        aliases: the earlier tensor that each is the same as, or None.
        views: index of a tensor -> the view that it is.
        shape_digest: of all but the values of the tree: equal if a plan can be used again.
        digest: of all of it, 16 bytes.
    """

    flat: Flat
    keys: tuple[str, ...]
    tensors: list[torch.Tensor]
    records: tuple[TensorRecord, ...]
    layouts: tuple[Layout | None, ...]
    aliases: tuple[int | None, ...]
    views: dict[int, View]
    shape_digest: bytes
    digest: bytes

    def label(self) -> bytes:
        """8 bytes that ranks over the same meshes share: their state must then have equal keys."""
        meshes = {layout.mesh for layout in self.layouts if layout is not None}
        told = sorted([list(mesh.shape), columns.pack("I", mesh.ranks)] for mesh in meshes)
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=8).digest()

    def table(self, members: Sequence[int]) -> Table:
        """The table of the key group of ``members``, who all hold this structure."""
        everyone = Layout(Mesh((len(members),), tuple(members)), (None,))
        layouts = tuple(everyone if layout is None else layout for layout in self.layouts)
        return Table(self.flat.tree, self.keys, self.records, layouts, self.aliases, self.views)

    def describe(self) -> dict[str, str]:
        """Key -> what the digest saw of it, in words."""
        return {
            key: f"{record.dtype} of {tuple(record.shape)}{_words(layout)}"
            for key, record, layout in zip(self.keys, self.records, self.layouts, strict=True)
            if key
        }


@uncollected()
def structure_of(state: Any, group_ranks: Sequence[int]) -> Structure:
    """Take ``state`` apart; nothing is copied.

    Raises:
        NotData: a value that is not data; the message has the path of its key.
    """
    flat = take_apart(state)
    keys = [leaf.key for leaf in flat.leaves]
    tensors = [leaf.tensor for leaf in flat.leaves]
    layouts_of = Layouts(group_ranks)
    layouts = [layouts_of.of(key, tensor) for key, tensor in zip(keys, tensors, strict=True)]
    aliases, views, spans = _sharing(tensors, layouts)
    keys += [""] * len(spans)
    layouts += [None] * len(spans)
    aliases += [None] * len(spans)
    tensors += spans
    records = tuple(TensorRecord(tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    shape_digest = _shape_digest(keys, records, layouts, aliases, views)
    own = [[item.key, item.marker.resize.value] for item in flat.own]
    told = hashlib.blake2b(shape_digest, digest_size=16)
    told.update(msgspec.msgpack.encode([flat.tree, own]))
    return Structure(
        flat, tuple(keys), tensors, records, tuple(layouts), tuple(aliases), views,
        shape_digest, told.digest(),
    )  # fmt: skip


def _shape_digest(
    keys: Sequence[str],
    records: Sequence[TensorRecord],
    layouts: Sequence[Layout | None],
    aliases: Sequence[int | None],
    views: dict[int, View],
) -> bytes:
    kinds = list(dict.fromkeys(record.dtype for record in records))
    kind_at = {kind: at for at, kind in enumerate(kinds)}
    places = list(dict.fromkeys(layouts))
    place_at = {place: at for at, place in enumerate(places)}
    told = [
        keys,
        [str(kind) for kind in kinds],
        [kind_at[record.dtype] for record in records],
        [record.shape for record in records],
        [place and [place.mesh.shape, columns.pack("I", place.mesh.ranks), _splits(place)]
         for place in places],
        [place_at[layout] for layout in layouts],
        aliases,
        [[at, view.span, view.offset, view.strides] for at, view in views.items()],
    ]  # fmt: skip
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=16).digest()


def _splits(layout: Layout) -> list[Any]:
    return [split and [split.dim, split.parts] for split in layout.splits]


def _words(layout: Layout | None) -> str:
    """Nothing for a plain tensor, whose layout goes without saying."""
    if layout is None:
        return ""
    ranks = layout.mesh.ranks
    told = str(ranks) if len(ranks) <= 8 else f"({ranks[0]}, ... {ranks[-1]})"
    return f" over mesh {layout.mesh.shape} of ranks {told} as {layout.splits}"


def replica_hashes(structure: Structure, rank: int, label: bytes) -> dict[bytes, Replica]:
    """Name of each replica set that this rank is in -> what it holds there.

    Args:
        structure: of this rank.
        rank: rank in the group that saves.
        label: of the rank's key group, whose ranks must hold equal plain tensors.
    """
    names: dict[Any, bytes] = {}
    places = {label: (0, 0)}  # size of the set, 0 for the key group's; number of this rank
    hashes: dict[bytes, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=8))
    rows = zip(structure.tensors, structure.layouts, structure.aliases, strict=True)
    for at, (tensor, layout, alias) in enumerate(rows):
        if alias is not None or at in structure.views:
            continue
        name = label
        if layout is not None:
            coordinate = layout.mesh.coordinate(rank)
            if coordinate is None:
                continue
            key, replicas, place = replica_set(layout, coordinate)
            if replicas == 1:
                continue
            if key not in names:
                told = [layout.mesh.shape, columns.pack("I", layout.mesh.ranks), key[1]]
                packed = msgspec.msgpack.encode(told)
                names[key] = hashlib.blake2b(packed, digest_size=8).digest()
                places[names[key]] = (replicas, place)
            name = names[key]
        hashes[name].update(content_hash(tensor).to_bytes(8, "little"))
    return {name: Replica(found.digest(), *places[name]) for name, found in hashes.items()}


def _sharing(
    tensors: Sequence[torch.Tensor], layouts: Sequence[Layout | None]
) -> tuple[list[int | None], dict[int, View], list[torch.Tensor]]:
    """Aliases, views and spans of tensors that share bytes."""
    aliases: list[int | None] = [None] * len(tensors)
    if not _any_shared(tensors):
        return aliases, {}, []
    same: dict[Any, int] = {}
    storages: dict[int, list[int]] = defaultdict(list)
    for at, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        local = local_tensor(tensor) if layout is not None else tensor
        if local.numel() == 0:
            continue
        address = local.data_ptr()
        seen = (address, local.dtype, local.shape, local.stride(), layout, local.is_conj(),
                local.is_neg())  # fmt: skip
        first = same.setdefault(seen, at)
        if first != at and tensors[first].shape == tensor.shape:
            aliases[at] = first
        elif layout is None:
            storages[local.untyped_storage().data_ptr()].append(at)
    views: dict[int, View] = {}
    spans: list[torch.Tensor] = []
    for members in storages.values():
        if len(members) > 1:
            _add_spans(tensors, members, views, spans)
    return aliases, views, spans


def _any_shared(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any two tensors have a byte in common: most states have none, and this is cheap."""
    ranges = []
    for tensor in tensors:
        local = tensor if type(tensor) in PLAIN else local_tensor(tensor)
        if local.numel():
            low = local.data_ptr()
            if local.is_contiguous():
                high = low + local.numel() * local.itemsize
            else:
                first, last = _byte_range(local)
                high = low + last - first
            ranges.append((low, high))
    ranges.sort()
    return any(high > low for (_, high), (low, _) in pairwise(ranges))


def _add_spans(
    tensors: Sequence[torch.Tensor],
    members: Sequence[int],
    views: dict[int, View],
    spans: list[torch.Tensor],
) -> None:
    """Group views of one storage that overlap, where one copy of their bytes is less than all."""
    plain = [at for at in members if not (tensors[at].is_conj() or tensors[at].is_neg())]
    ranges = sorted((*_byte_range(tensors[at]), at) for at in plain)
    groups: list[tuple[int, int, list[int]]] = []
    for low, high, at in ranges:
        if groups and low < groups[-1][1]:
            first, last, inside = groups[-1]
            groups[-1] = (first, max(last, high), [*inside, at])
        else:
            groups.append((low, high, [at]))
    for low, high, inside in groups:
        alone = sum(tensors[at].numel() * tensors[at].itemsize for at in inside)
        fits = all(low % tensors[at].itemsize == 0 for at in inside)
        if len(inside) > 1 and high - low < alone and fits:
            raw = tensors[inside[0]]
            storage = torch.empty(0, dtype=torch.uint8, device=raw.device)
            span = storage.set_(raw.untyped_storage(), low, (high - low,), (1,))
            spans.append(span)
            for at in inside:
                tensor = tensors[at]
                offset = int(tensor.storage_offset()) - low // tensor.itemsize
                number = len(tensors) + len(spans) - 1
                views[at] = View(number, offset, tuple(tensor.stride()))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and one past its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    low = int(tensor.storage_offset()) * tensor.itemsize
    return low, low + (reach + 1) * tensor.itemsize
