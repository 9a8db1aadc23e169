"""One committed generation, read record by record as it is needed, each checked by its digest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from pt214_dcp import files
from pt214_dcp.errors import ChunkCorrupt, NotACheckpoint
from pt214_dcp.manifest import Manifest, manifest_name, unpack_manifest
from pt214_dcp.root import (
    COMMIT,
    INDEX,
    PAGE_RANKS,
    Commit,
    RankRecord,
    page_of,
    unpack_commit,
    unpack_page,
)
from pt214_dcp.stores.place import Where, read_range, read_record
from pt214_dcp.table import Table, TensorRecord, table_name, unpack_table
from pt214_dcp.trees import Json

ROOT_READS = 10  # a saver may replace the checkpoint while its records are read


class Replaced(ChunkCorrupt):
    """A file of the generation is gone: a saver replaced it, or somebody removed it."""


class Checkpoint:
    """Records of one generation.

    Args:
        path: folder of the checkpoint.
        commit: its root record.

    Raises:
        ChunkCorrupt: (from every method) a record is damaged.
        Replaced: (from every method) a file is gone; read the root again.
    """

    def __init__(self, path: Where, commit: Commit) -> None:
        self.path, self.commit = path, commit
        self.folder = path / commit.generation
        self.read_bytes = 0  # of records, so far
        self._pages: dict[int, list[RankRecord]] = {}
        self._tables: dict[int, Table] = {}
        self._manifests: dict[int, Manifest] = {}

    def table(self, group: int) -> Table:
        """Table of a key group."""
        if group not in self._tables:
            expected = self.commit.tables[group]
            path = self.folder / table_name(group)
            data = self._record(path, expected.size_bytes, expected.digest)
            self._tables[group] = unpack_table(data, str(path), self.commit.world_size)
        return self._tables[group]

    def record(self, rank: int) -> RankRecord:
        """What the index says of ``rank``."""
        page, at, size_bytes = page_of(rank, self.commit.world_size)
        if page not in self._pages:
            path = self.folder / INDEX
            try:
                data = read_range(path, at, size_bytes)
            except FileNotFoundError as error:
                raise Replaced(f"{path}: named by {self.path}, but missing") from error
            found = files.digest(data)
            if found != self.commit.pages[page] or len(data) != size_bytes:
                wanted = self.commit.pages[page]
                raise ChunkCorrupt(
                    f"{path} at offset {at}: expected digest {wanted.hex()}, found "
                    f"{found.hex()} in {len(data)} bytes"
                )
            self.read_bytes += len(data)
            self._pages[page] = unpack_page(data)
        return self._pages[page][rank % PAGE_RANKS]

    def manifest(self, rank: int) -> Manifest:
        """What ``rank`` wrote."""
        if rank not in self._manifests:
            record = self.record(rank)
            path = self.folder / manifest_name(rank)
            data = self._record(path, record.manifest_bytes, record.digest)
            if record.group >= len(self.commit.tables):
                raise ChunkCorrupt(f"{self.folder / INDEX}: rank {rank} in group {record.group}")
            manifest = unpack_manifest(data, str(path), self.table(record.group))
            told = (manifest.rank, manifest.group, manifest.data_bytes)
            if told != (rank, record.group, record.data_bytes):
                raise ChunkCorrupt(
                    f"{path}: rank, group and bytes of data are {told}; the index says "
                    f"{(rank, record.group, record.data_bytes)}"
                )
            self._manifests[rank] = manifest
        return self._manifests[rank]

    def manifests(self) -> Iterator[Manifest]:
        """Every rank's, in their order."""
        return map(self.manifest, range(self.commit.world_size))

    def data_path(self, manifest: Manifest, file: int = 0) -> Where:
        """The file that ``file`` of a block's place stands for; 0 is the rank's own."""
        return self.folder / (manifest.files[file - 1] if file else manifest.name)

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """All of them."""
        return tuple(map(self.table, range(len(self.commit.tables))))

    @property
    def tree(self) -> Json:
        """Nesting and values of the first key group."""
        return self.table(0).tree

    @cached_property
    def tensors(self) -> dict[str, TensorRecord]:
        """Each key's dtype and global shape, over all key groups."""
        found: dict[str, TensorRecord] = {}
        for table in reversed(self.tables):
            rows = zip(table.keys, table.tensors, strict=True)
            found = {key: record for key, record in rows if key} | {
                key: record for key, record in found.items() if key not in table.index
            }
        return found

    def _record(self, path: Where, size_bytes: int, digest: bytes) -> bytes:
        try:
            data = read_record(path)
        except FileNotFoundError as error:
            raise Replaced(f"{path}: named by {self.path}, but missing") from error
        found = files.digest(data)
        if (len(data), found) != (size_bytes, digest):
            raise ChunkCorrupt(
                f"{path}: expected {size_bytes} bytes with digest {digest.hex()}, found "
                f"{len(data)} bytes with {found.hex()}"
            )
        self.read_bytes += len(data)
        return data


def read_commit(path: Where) -> Commit:
    """Read and check the root record of the checkpoint at ``path``.

    Raises:
        NotACheckpoint: there is none, or one of another format or version.
        ChunkCorrupt: it is damaged.
    """
    try:
        data = read_record(path / COMMIT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(f"{path}: no {COMMIT} here, so nothing was ever committed") from error
    return unpack_commit(data, str(path / COMMIT))


def open_checkpoint(path: Where) -> Checkpoint:
    """The checkpoint at ``path``, its first table read; again, if a saver replaced it meanwhile.

    Raises:
        NotACheckpoint: nothing is committed at ``path``.
        ChunkCorrupt: a record is damaged or files are missing.
    """
    seen: Commit | None = None
    for _ in range(ROOT_READS):
        checkpoint = Checkpoint(path, read_commit(path))
        try:
            checkpoint.table(0)
        except Replaced as error:
            if checkpoint.commit == seen:
                raise ChunkCorrupt(str(error)) from error
            seen = checkpoint.commit
            continue
        return checkpoint
    raise NotACheckpoint(f"{path}: replaced {ROOT_READS} times while it was read; stop the saver")
