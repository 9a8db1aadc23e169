"""What one rank wrote: which part of which tensor, where its bytes lie, and their checksums.

    path/gen-<uuid>/rank-00000.manifest      this record
    path/gen-<uuid>/rank-00000.safetensors   a header, then chunks end to end, little-endian

A *chunk* is a box of a tensor in row-major order, cut in *blocks* of ``BLOCK_BYTES``; each block
has a checksum, so that a part of a chunk can be read and still be checked. Blocks lie in the rank's
own data file, one after the other, and the file is one that readers of safetensors take. After an
incremental save they lie anywhere in this file and in those of earlier generations, which are then
hard links in this one's folder: two more columns say where, and the own file, which lacks blocks,
is called ``rank-00000.data``.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from pt214_dcp import columns
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.layout import Box, whole_box
from pt214_dcp.table import Table, TensorRecord, dtype_of, unpack_shapes
from pt214_dcp.trees import Json, checked

BLOCK_BYTES = 1 << 20  # one checksum each, so 8 bytes a MiB; not tuned
HASH_BYTES = 16
LINKED = re.compile(r"from-[0-9a-f]{32}-rank-\d{5,8}\.(safetensors|data)")
_CHECKSUM, _HASH = "xxh3_64", "xxh3_128"


class Chunk(NamedTuple):
    """A box of a tensor.

    Attributes:
        tensor: index in the table of the rank's group; beyond its end, in the manifest's ``own``.
        box: which part of the global tensor.
        size_bytes: of the box.
        first_block: number of its first block among all of the manifest.
    """

    tensor: int
    box: Box
    size_bytes: int
    first_block: int

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return -(-self.size_bytes // BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Own:
    """What stands in one ``PerRank``: its tree, and how many tensors it has."""

    tree: Json
    tensors: int


@dataclass(frozen=True)
class Manifest:
    """What one rank wrote.

    Attributes:
        rank: who.
        group: number of its key group.
        data_bytes: size of its data file.
        header_bytes: before the first block.
        header_checksum: of those.
        own: one a ``PerRank`` of the tree.
        own_tensors: their tensors, one after the other.
        chunks: what is stored, in the order of the blocks.
        checksums: of each block.
        block_files: 0 for the rank's own data file, else 1 + index in ``files``; None: all own.
        block_offsets: where each block begins in its file; None: end to end after the header.
        files: names of other data files of the generation that hold blocks of earlier ones.
        hashes: ``HASH_BYTES`` for each block; empty if it was not asked for.
    """

    rank: int
    group: int
    data_bytes: int
    header_bytes: int
    header_checksum: int
    own: tuple[Own, ...]
    own_tensors: tuple[TensorRecord, ...]
    chunks: tuple[Chunk, ...]
    checksums: array[int]
    block_files: array[int] | None
    block_offsets: array[int] | None
    files: tuple[str, ...]
    hashes: bytes

    @cached_property
    def block_sizes(self) -> array[int]:
        """Bytes of each block."""
        return block_sizes(chunk.size_bytes for chunk in self.chunks)

    @cached_property
    def starts(self) -> array[int]:
        """Where each block begins in its file."""
        if self.block_offsets is not None:
            return self.block_offsets
        at, found = self.header_bytes, array("q")
        for size in self.block_sizes:
            found.append(at)
            at += size
        return found

    @property
    def name(self) -> str:
        """Name of the rank's own data file."""
        return data_name(self.rank, valid=self.header_bytes > 0)

    def file_of(self, block: int) -> int:
        """0 for the rank's own data file, else 1 + index in ``files``."""
        return 0 if self.block_files is None else self.block_files[block]


def block_sizes(chunk_sizes: Any) -> array[int]:
    """Bytes of each block of chunks of ``chunk_sizes`` bytes."""
    sizes = array("I")
    for size in chunk_sizes:
        if size <= BLOCK_BYTES:
            if size:
                sizes.append(size)
            continue
        whole, rest = divmod(size, BLOCK_BYTES)
        sizes.extend([BLOCK_BYTES] * whole)
        if rest:
            sizes.append(rest)
    return sizes


def data_name(rank: int, *, valid: bool = True) -> str:
    """File name of a rank's data in its generation; ``valid`` if safetensors' readers take it."""
    return f"rank-{rank:05d}.{'safetensors' if valid else 'data'}"


def linked_name(generation: str, name: str) -> str:
    """Name of a data file of an earlier generation, linked into a later one."""
    return name if LINKED.fullmatch(name) else f"from-{generation.removeprefix('gen-')}-{name}"


def manifest_name(rank: int) -> str:
    """File name of a rank's manifest in its generation."""
    return f"rank-{rank:05d}.manifest"


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """What does not change from save to save, packed once: tensor and box of each chunk."""

    tensor: bytes
    ndim: bytes
    start: bytes
    size: bytes

    @staticmethod
    def of(parts: Sequence[tuple[int, Box]]) -> ChunkColumns:
        """Columns of ``(tensor, box)`` in the order of the file."""
        return ChunkColumns(
            columns.pack("I", [tensor for tensor, _ in parts]),
            columns.pack("B", [len(box.start) for _, box in parts]),
            columns.pack("q", [n for _, box in parts for n in box.start]),
            columns.pack("q", [n for _, box in parts for n in box.size]),
        )


def pack_manifest(manifest: Manifest, chunks: ChunkColumns) -> bytes:
    """Bytes of a manifest; ``chunks`` stands for ``manifest.chunks``."""
    own = manifest.own_tensors
    shapes = [record.shape for record in own]
    body = {
        "rank": manifest.rank,
        "group": manifest.group,
        "data_bytes": manifest.data_bytes,
        "block_bytes": BLOCK_BYTES,
        "header": [manifest.header_bytes, manifest.header_checksum],
        "own": [[item.tree, item.tensors] for item in manifest.own],
        "own_dtypes": [str(record.dtype).removeprefix("torch.") for record in own],
        "own_ndim": columns.pack("B", map(len, shapes)),
        "own_shape": columns.pack("q", [n for shape in shapes for n in shape]),
        "chunk_tensor": chunks.tensor,
        "chunk_ndim": chunks.ndim,
        "chunk_start": chunks.start,
        "chunk_size": chunks.size,
        "checksum": _CHECKSUM,
        "checksums": columns.pack("Q", manifest.checksums),
        "files": manifest.files,
        "hash": _HASH if manifest.hashes else "",
        "hashes": manifest.hashes,
    }
    if manifest.block_files is not None and manifest.block_offsets is not None:
        body["block_file"] = columns.pack("H", manifest.block_files)
        body["block_offset"] = columns.pack("q", manifest.block_offsets)
    return msgspec.msgpack.encode(body)


def unpack_manifest(data: bytes, where: str, table: Table) -> Manifest:
    """Inverse of ``pack_manifest``; the caller has checked the digest.

    Args:
        data: its bytes.
        where: file name for messages.
        table: of the rank's group.

    Raises:
        ChunkCorrupt: it claims what can't be.
    """
    try:
        return _parse(msgspec.msgpack.decode(data), table)
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, ValueError,
            AttributeError, IndexError, OverflowError, MemoryError) as error:  # fmt: skip
        raise ChunkCorrupt(f"{where}: a field is missing or malformed: {error}") from error


def _parse(body: dict[str, Any], table: Table) -> Manifest:
    if body["block_bytes"] != BLOCK_BYTES:
        raise ValueError(f"block_bytes is {body['block_bytes']}, this release reads {BLOCK_BYTES}")
    if body["checksum"] != _CHECKSUM:
        raise ValueError(f"checksums of kind {body['checksum']!r}; this release knows {_CHECKSUM}")
    shapes = unpack_shapes(body["own_ndim"], body["own_shape"])
    own_tensors = tuple(
        TensorRecord(dtype_of(name), shape)
        for name, shape in zip(body["own_dtypes"], shapes, strict=True)
    )
    own = tuple(Own(tree, int(count)) for tree, count in body["own"])
    if sum(item.tensors for item in own) != len(own_tensors):
        raise ValueError(f"{len(own_tensors)} tensors of this rank alone")
    for item in own:
        checked(item.tree, item.tensors, 0)
    if len(own) != len(table.per_rank):
        raise ValueError(f"{len(own)} values of this rank alone of {len(table.per_rank)}")
    chunks = _chunks(body, (*table.tensors, *own_tensors))
    _check_own(chunks, len(table.tensors), own_tensors)
    offsets = None
    if "block_file" in body:
        offsets = columns.unpack("q", body["block_offset"])
    header_bytes, header_checksum = map(int, body["header"])
    manifest = Manifest(
        rank=int(body["rank"]),
        group=int(body["group"]),
        data_bytes=int(body["data_bytes"]),
        header_bytes=header_bytes,
        header_checksum=header_checksum,
        own=own,
        own_tensors=own_tensors,
        chunks=chunks,
        checksums=columns.unpack("Q", body["checksums"]),
        block_files=None if offsets is None else columns.unpack("H", body["block_file"]),
        block_offsets=offsets,
        files=tuple(body["files"]),
        hashes=bytes(body["hashes"]),
    )
    if manifest.hashes and body["hash"] != _HASH:
        raise ValueError(f"hashes of kind {body['hash']!r}; this release knows {_HASH}")
    _check(manifest)
    return manifest


def _chunks(body: dict[str, Any], tensors: Sequence[TensorRecord]) -> tuple[Chunk, ...]:
    places = columns.unpack("I", body["chunk_tensor"])
    starts = unpack_shapes(body["chunk_ndim"], body["chunk_start"])
    sizes = unpack_shapes(body["chunk_ndim"], body["chunk_size"])
    chunks, block = [], 0
    for place, start, size in zip(places, starts, sizes, strict=True):
        record = tensors[place]
        if (size != record.shape or any(start)) and any(
            a + n > whole for a, n, whole in zip(start, size, record.shape, strict=True)
        ):
            raise ValueError(f"chunk {start} {size} lies outside tensor {place} {record.shape}")
        chunk = Chunk(place, Box(start, size), math.prod(size) * record.dtype.itemsize, block)
        chunks.append(chunk)
        block += chunk.blocks
    return tuple(chunks)


def _check_own(chunks: Sequence[Chunk], first: int, own: Sequence[TensorRecord]) -> None:
    """What is one rank's own lies whole in one chunk: nobody else has a part of it."""
    held = [(chunk.tensor - first, chunk.box) for chunk in chunks if chunk.tensor >= first]
    whole = [(at, whole_box(own[at].shape)) for at in range(len(own)) if 0 not in own[at].shape]
    if sorted(held) != whole:
        raise ValueError(f"{len(held)} chunks for {len(whole)} tensors of this rank alone")


def _check(manifest: Manifest) -> None:
    # Counted before anything is made of them: chunks of a hostile record may have any size.
    blocks = sum(chunk.blocks for chunk in manifest.chunks)
    if len(manifest.checksums) != blocks:
        raise ValueError(f"{len(manifest.checksums)} checksums for {blocks} blocks")
    if manifest.hashes and len(manifest.hashes) != HASH_BYTES * blocks:
        raise ValueError(f"{len(manifest.hashes)} bytes of hashes for {blocks} blocks")
    for name in manifest.files:
        if not isinstance(name, str) or not LINKED.fullmatch(name):
            raise ValueError(f"{name!r} is no data file of an earlier generation")
    if manifest.block_files is None or manifest.block_offsets is None:
        needed = manifest.header_bytes + sum(manifest.block_sizes)
        if needed != manifest.data_bytes:
            raise ValueError(f"blocks need {needed} bytes of {manifest.data_bytes}")
        return
    if not len(manifest.block_files) == len(manifest.block_offsets) == blocks:
        raise ValueError(f"places of {len(manifest.block_files)} blocks for {blocks}")
    if max(manifest.block_files, default=0) > len(manifest.files):
        raise ValueError(f"blocks in more files than the {len(manifest.files)} named")
    if min(manifest.block_offsets, default=0) < 0:
        raise ValueError("a block before the begin of its file")
