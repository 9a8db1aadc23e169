"""Open data files of a checkpoint, and read blocks from them, each against its checksum."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import crc32c

from pt214_dcp import files
from pt214_dcp.checkpoint import Checkpoint, Replaced
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Block:
    """One block: where it lies, what it must hash to, whose it is."""

    fd: int
    at: int
    size_bytes: int
    crc: int
    rank: int  # of the manifest, for messages
    file: int  # of the manifest, for messages
    tensor: int


class DataFiles:
    """Data files of one generation, open until the end: a saver may unlink them meanwhile.

    Args:
        checkpoint: whose.
        patient: leave a file's header, which no load needs, unchecked; see ``check_header``.
    """

    def __init__(self, checkpoint: Checkpoint, *, patient: bool = False) -> None:
        self.checkpoint, self._patient = checkpoint, patient
        self.read_bytes = 0  # of data, so far
        self._fds: dict[tuple[int, int], int] = {}
        self._stack = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def block(self, manifest: Manifest, number: int, tensor: int) -> Block:
        """Block ``number`` of a manifest, its file open."""
        file = manifest.file_of(number)
        fd = self.open(manifest, file)
        at, size = manifest.starts[number], manifest.block_sizes[number]
        return Block(fd, at, size, manifest.crcs[number], manifest.rank, file, tensor)

    def read(self, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
        """Fill ``into`` with blocks that lie end to end in one file, and check them.

        Raises:
            ChunkCorrupt: bytes differ from what was written, or are missing.
        """
        left, at = list(into), blocks[0].at
        while left:
            count = os.preadv(blocks[0].fd, left, at)
            if count == 0:
                raise ChunkCorrupt(f"{self._told(blocks[-1])}: the file ends at {at}")
            at += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if left and count:
                left[0] = left[0][count:]
        with self._lock:
            self.read_bytes += at - blocks[0].at
        for block, data in zip(blocks, into, strict=True):
            found = crc32c.crc32c(data)
            if found != block.crc:
                raise ChunkCorrupt(
                    f"{self._told(block)}: expected crc32c {block.crc:08x}, found {found:08x}"
                )

    def open(self, manifest: Manifest, file: int = 0) -> int:
        """File descriptor of a data file; the rank's own is as long as the index says.

        Raises:
            Replaced: it is gone.
            ChunkCorrupt: it is no regular file, has another length, or its header is damaged.
        """
        seen = (manifest.rank, file)
        if seen not in self._fds:
            path = self.checkpoint.data_path(manifest, file)
            if path.parent.is_symlink():
                raise ChunkCorrupt(f"{path.parent}: a symbolic link; only folders are followed")
            try:
                fd = files.open_to_read(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise Replaced(f"{path}: named by {self.checkpoint.path}, but missing") from error
            self._stack.callback(os.close, fd)
            self._fds[seen] = fd
            if not file:
                check_length(path, fd, manifest)
                if not self._patient:
                    check_header(path, fd, manifest)
        return self._fds[seen]

    def _told(self, block: Block) -> str:
        """File, key and offset of a block, for messages."""
        manifest = self.checkpoint.manifest(block.rank)
        path = self.checkpoint.data_path(manifest, block.file)
        keys = self.checkpoint.table(manifest.group).keys
        key = keys[block.tensor] if block.tensor < len(keys) else "a PerRank tensor"
        return f"{path}: {key or 'shared bytes'} at offset {block.at}"


def check_length(path: Path, fd: int, manifest: Manifest) -> None:
    """Raise ChunkCorrupt unless a rank's own data file is as long as its manifest says."""
    found = os.fstat(fd).st_size
    if found != manifest.data_bytes:
        raise ChunkCorrupt(f"{path}: expected {manifest.data_bytes} bytes, found {found}")
    if manifest.header_bytes > found:
        raise ChunkCorrupt(f"{path}: a header of {manifest.header_bytes} bytes in {found}")


def check_header(path: Path, fd: int, manifest: Manifest) -> None:
    """Raise ChunkCorrupt if the header, which other readers trust, is not what was written."""
    crc = crc32c.crc32c(os.pread(fd, manifest.header_bytes, 0))
    if crc != manifest.header_crc:
        raise ChunkCorrupt(
            f"{path}: header at offset 0: expected crc32c {manifest.header_crc:08x}, "
            f"found {crc:08x}"
        )
