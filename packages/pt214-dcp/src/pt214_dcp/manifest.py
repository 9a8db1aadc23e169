"""The two records of a checkpoint, and their checks against lies.

    path/COMMIT.json                      one per checkpoint: which generation, which ranks
    path/gen-<uuid>/rank-00000.manifest   one per rank: tensors, chunks, checksums
    path/gen-<uuid>/rank-00000.data       chunks end to end, little-endian, no holes

A chunk is a box of a tensor in row-major order. Each run of ``BLOCK_BYTES`` within it has a crc32c,
so that a part of a chunk can be read and still be checked. Rank 0's manifest also holds the tree:
nesting, scalars, and which tensor belongs where.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pt214_dcp import files
from pt214_dcp.errors import ChunkCorrupt, NotACheckpoint
from pt214_dcp.layout import Box, Shape
from pt214_dcp.state import Json

FORMAT, VERSION = "pt214-dcp", 1
COMMIT = "COMMIT.json"
BLOCK_BYTES = 1 << 20  # one crc32c each, so 4 bytes a MiB; not tuned yet
_GENERATION = re.compile(r"gen-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What the commit knows of one rank's files."""

    manifest_bytes: int
    manifest_digest: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The root record; ``generation`` names the folder that holds everything else."""

    generation: str
    ranks: tuple[RankRecord, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of data and manifests on all ranks."""
        return sum(rank.data_bytes + rank.manifest_bytes for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor at ``offset`` bytes in the data file of ``rank``."""

    key: str
    box: Box
    rank: int
    offset: int
    size_bytes: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Global shape and dtype of a tensor."""

    dtype: torch.dtype
    shape: Shape


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank wrote; ``tree`` is None on all ranks but 0."""

    rank: int
    data_bytes: int
    tree: Json
    keys: tuple[str, ...]
    tensors: tuple[TensorRecord, ...]
    chunks: tuple[Chunk, ...] = field(repr=False)


def data_name(rank: int) -> str:
    """File name of a rank's data in its generation."""
    return f"rank-{rank:05d}.data"


def manifest_name(rank: int) -> str:
    """File name of a rank's manifest in its generation."""
    return f"rank-{rank:05d}.manifest"


def pack_commit(commit: Commit) -> bytes:
    """Bytes of ``COMMIT.json``."""
    ranks = [[r.manifest_bytes, r.manifest_digest, r.data_bytes] for r in commit.ranks]
    return files.pack(
        {"format": FORMAT, "version": VERSION, "generation": commit.generation, "ranks": ranks}
    )


def read_commit(path: Path) -> Commit:
    """Read and check the root record of the checkpoint at ``path``.

    Raises:
        NotACheckpoint: there is none, or one of another format or version.
        ChunkCorrupt: it is damaged.
    """
    try:
        data = files.read_record(path / COMMIT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(f"{path}: no {COMMIT} here, so nothing was ever committed") from error
    body = files.unpack(data, path / COMMIT)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise NotACheckpoint(f"{path / COMMIT}: a record of another format, not {FORMAT}")
    if body.get("version") != VERSION:
        raise NotACheckpoint(
            f"{path / COMMIT}: format version {body.get('version')!r}; this release reads {VERSION}"
        )
    try:
        ranks = tuple(RankRecord(int(m), str(d), int(n)) for m, d, n in body["ranks"])
        commit = Commit(str(body["generation"]), ranks)
    except (KeyError, TypeError, ValueError) as error:
        raise ChunkCorrupt(f"{path / COMMIT}: a field is missing or malformed: {error}") from error
    if not _GENERATION.fullmatch(commit.generation):
        raise ChunkCorrupt(
            f"{path / COMMIT}: generation {commit.generation!r} is no folder of ours"
        )
    return commit


def pack_manifest(manifest: Manifest) -> bytes:
    """Bytes of one rank's manifest: columns, since JSON repeats the names of rows."""
    place = {key: at for at, key in enumerate(manifest.keys)}
    chunks = manifest.chunks
    return files.pack(
        {
            "rank": manifest.rank,
            "data_bytes": manifest.data_bytes,
            "block_bytes": BLOCK_BYTES,
            "tree": manifest.tree,
            "keys": manifest.keys,
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in manifest.tensors],
            "shapes": [t.shape for t in manifest.tensors],
            "chunk_key": [place[chunk.key] for chunk in chunks],
            "chunk_start": [chunk.box.start for chunk in chunks],
            "chunk_size": [chunk.box.size for chunk in chunks],
            "chunk_crcs": [chunk.crcs for chunk in chunks],
        }
    )


def read_manifest(folder: Path, rank: int, expected: RankRecord) -> Manifest:
    """Read one rank's manifest and check it against the commit and against itself.

    Raises:
        FileNotFoundError: the generation is gone; the caller reads the root record again.
        ChunkCorrupt: it is damaged, or claims what can't be.
    """
    path = folder / manifest_name(rank)
    data = files.read_record(path)
    found = files.digest(data)
    if (len(data), found) != (expected.manifest_bytes, expected.manifest_digest):
        raise ChunkCorrupt(
            f"{path}: expected {expected.manifest_bytes} bytes with digest "
            f"{expected.manifest_digest}, found {len(data)} bytes with {found}"
        )
    body = files.unpack(data, path)
    try:
        manifest = _parse(body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ChunkCorrupt(f"{path}: a field is missing or malformed: {error}") from error
    if manifest.rank != rank or manifest.data_bytes != expected.data_bytes:
        raise ChunkCorrupt(
            f"{path}: it is of rank {manifest.rank} with {manifest.data_bytes} bytes of data; "
            f"the commit says rank {rank} with {expected.data_bytes}"
        )
    return manifest


def _parse(body: dict[str, Any]) -> Manifest:
    if body["block_bytes"] != BLOCK_BYTES:
        raise ValueError(f"block_bytes is {body['block_bytes']}, this release reads {BLOCK_BYTES}")
    columns = zip(body["dtypes"], body["shapes"], strict=True)
    tensors = tuple(TensorRecord(dtype_of(name), _shape(shape)) for name, shape in columns)
    keys = tuple(map(str, body["keys"]))
    if len(keys) != len(tensors):
        raise ValueError(f"{len(keys)} keys for {len(tensors)} tensors")
    chunks, offset = [], 0
    names = ("chunk_key", "chunk_start", "chunk_size", "chunk_crcs")
    for place, start, size, crcs in zip(*(body[name] for name in names), strict=True):
        box, tensor = Box(_shape(start), _shape(size)), tensors[place]
        ends = [a + n for a, n in zip(box.start, box.size, strict=True)]
        if any(end > n for end, n in zip(ends, tensor.shape, strict=True)):
            raise ValueError(f"chunk {box} lies outside {keys[place]} of shape {tensor.shape}")
        size_bytes = box.numel * tensor.dtype.itemsize
        if len(crcs) != math.ceil(size_bytes / BLOCK_BYTES):
            raise ValueError(f"{len(crcs)} checksums for {size_bytes} bytes of {keys[place]}")
        crcs = tuple(map(int, crcs))
        chunks.append(Chunk(keys[place], box, body["rank"], offset, size_bytes, crcs))
        offset += size_bytes
    if offset != body["data_bytes"]:
        raise ValueError(f"chunks need {offset} bytes of {body['data_bytes']}")
    return Manifest(body["rank"], offset, body["tree"], keys, tensors, tuple(chunks))


def dtype_of(name: str) -> torch.dtype:
    """The dtype that torch calls ``name``."""
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _shape(values: Any) -> Shape:
    if any(type(n) is not int or n < 0 for n in values):
        raise ValueError(f"not a shape: {values!r}")
    return tuple(values)
