"""The root of a checkpoint, and the index of its ranks.

    path/COMMIT.json        which generation, how many ranks, digests of the two below
    path/gen-<uuid>/index   one record of fixed size a rank, in pages of 128

A loader reads the root, the one page that holds the rank it wants, and that rank's manifest: what
it reads does not grow with the number of ranks.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pt214_dcp import files
from pt214_dcp.errors import ChunkCorrupt, NotACheckpoint

FORMAT, VERSION = "pt214-dcp", 1
COMMIT, INDEX = "COMMIT.json", "index"
GENERATION = re.compile(r"gen-[0-9a-f]{32}")
PAGE_RANKS = 128
_RECORD = struct.Struct("<QQI16s")
RECORD_BYTES = _RECORD.size
MAX_RANKS = 1 << 24


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What the index knows of one rank's files.

    Attributes:
        manifest_bytes: size of its manifest.
        data_bytes: size of its data file.
        group: number of its key group, whose table it leans on.
        digest: of the manifest's bytes, 16 bytes.
    """

    manifest_bytes: int
    data_bytes: int
    group: int
    digest: bytes

    def pack(self) -> bytes:
        """The record of fixed size."""
        return _RECORD.pack(self.manifest_bytes, self.data_bytes, self.group, self.digest)

    @staticmethod
    def unpack(data: bytes) -> RankRecord:
        """Inverse of ``pack``."""
        return RankRecord(*_RECORD.unpack(data))


@dataclass(frozen=True, slots=True)
class TableRecord:
    """The table of one key group: its size and digest."""

    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """The root record.

    Attributes:
        generation: the folder that holds everything else.
        world_size: ranks that saved.
        tables: one a key group.
        pages: digest of each page of the index.
        size_bytes: data, manifests and tables that this save wrote.
    """

    generation: str
    world_size: int
    tables: tuple[TableRecord, ...]
    pages: tuple[bytes, ...]
    size_bytes: int


def pack_index(records: Sequence[RankRecord]) -> tuple[bytes, tuple[bytes, ...]]:
    """Bytes of the index, and the digest of each of its pages."""
    data = b"".join(record.pack() for record in records)
    step = PAGE_RANKS * RECORD_BYTES
    pages = tuple(files.digest(data[at : at + step]) for at in range(0, len(data), step))
    return data, pages


def page_of(rank: int, world_size: int) -> tuple[int, int, int]:
    """Number of the page that holds ``rank``, its first byte in the index, and its size."""
    page = rank // PAGE_RANKS
    ranks = min(PAGE_RANKS, world_size - page * PAGE_RANKS)
    return page, page * PAGE_RANKS * RECORD_BYTES, ranks * RECORD_BYTES


def unpack_page(data: bytes) -> list[RankRecord]:
    """Records of one page."""
    return [
        RankRecord.unpack(data[at : at + RECORD_BYTES]) for at in range(0, len(data), RECORD_BYTES)
    ]


def pack_commit(commit: Commit) -> bytes:
    """Bytes of ``COMMIT.json``."""
    return files.pack(
        {
            "format": FORMAT,
            "version": VERSION,
            "generation": commit.generation,
            "world_size": commit.world_size,
            "tables": [[table.size_bytes, table.digest.hex()] for table in commit.tables],
            "pages": [page.hex() for page in commit.pages],
            "size_bytes": commit.size_bytes,
        }
    )


def unpack_commit(data: bytes, where: str) -> Commit:
    """Check and read the root record.

    Raises:
        NotACheckpoint: a record of another format or version.
        ChunkCorrupt: it is damaged.
    """
    body = files.unpack(data, where)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise NotACheckpoint(f"{where}: a record of another format, not {FORMAT}")
    if body.get("version") != VERSION:
        raise NotACheckpoint(
            f"{where}: format version {body.get('version')!r}; this release reads {VERSION}"
        )
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError) as error:
        raise ChunkCorrupt(f"{where}: a field is missing or malformed: {error}") from error


def _parse(body: dict[str, Any]) -> Commit:
    tables = tuple(TableRecord(_count(size), _digest(text)) for size, text in body["tables"])
    commit = Commit(
        _generation(body["generation"]),
        _count(body["world_size"]),
        tables,
        tuple(_digest(page) for page in body["pages"]),
        _count(body["size_bytes"]),
    )
    if not 0 < commit.world_size <= MAX_RANKS:
        raise ValueError(f"world_size is {commit.world_size}")
    if len(commit.pages) != -(-commit.world_size // PAGE_RANKS):
        raise ValueError(f"{len(commit.pages)} pages for {commit.world_size} ranks")
    if not 0 < len(tables) <= commit.world_size:
        raise ValueError(f"{len(tables)} tables for {commit.world_size} ranks")
    return commit


def _generation(value: Any) -> str:
    if not isinstance(value, str) or not GENERATION.fullmatch(value):
        raise ValueError(f"generation {value!r} is no folder of ours")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _digest(text: Any) -> bytes:
    data = bytes.fromhex(text)
    if len(data) != 16:
        raise ValueError(f"{text!r} is no digest")
    return data
