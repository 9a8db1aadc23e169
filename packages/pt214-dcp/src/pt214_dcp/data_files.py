"""Open data files of a checkpoint, and read blocks from them, each against its checksum."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from pt214_dcp.blocks import checksum
from pt214_dcp.checkpoint import Checkpoint, Replaced
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.manifest import Manifest
from pt214_dcp.stores import opened
from pt214_dcp.stores.place import Place, Where

# Read, then checked while it is in the core's cache: with 8 MiB a load takes a quarter longer.
_PIECE_BYTES = 1 << 20
_MOST_BUFFERS = 1000  # of one preadv; IOV_MAX is 1024 on Linux and macOS


class Run(NamedTuple):
    """Blocks of one chunk that lie end to end in one file.

    Attributes:
        fd: of the file.
        at: where the first block begins.
        size_bytes: of all of them.
        manifest: whose blocks they are.
        first: number of the first block.
        blocks: how many.
        tensor: of the chunk, for messages.
    """

    fd: int
    at: int
    size_bytes: int
    manifest: Manifest
    first: int
    blocks: int
    tensor: int

    def checksums(self) -> Sequence[int]:
        """Of each block."""
        return self.manifest.checksums[self.first : self.first + self.blocks]

    def views(self, into: memoryview) -> list[memoryview]:
        """``into`` cut in blocks."""
        if self.blocks == 1:
            return [into]
        views, at = [], 0
        for size in self.manifest.block_sizes[self.first : self.first + self.blocks]:
            views.append(into[at : at + size])
            at += size
        return views


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

    def runs(self, manifest: Manifest, first: int, count: int, tensor: int) -> Iterator[Run]:
        """Blocks ``first`` and on of a manifest in as few runs as can be; their files are open."""
        sizes, starts = manifest.block_sizes, manifest.starts
        if manifest.block_files is None:
            size = sizes[first] if count == 1 else sum(sizes[first : first + count])
            yield Run(self.open(manifest), starts[first], size, manifest, first, count, tensor)
            return
        begin = number = first
        while number < first + count:
            file, end = manifest.file_of(begin), starts[begin]
            while (
                number < first + count
                and (manifest.file_of(number), starts[number]) == (file, end)
            ):  # fmt: skip
                end += sizes[number]
                number += 1
            fd, size = self.open(manifest, file), end - starts[begin]
            yield Run(fd, starts[begin], size, manifest, begin, number - begin, tensor)
            begin = number

    def read(self, runs: Sequence[Run], into: Sequence[memoryview]) -> None:
        """Fill ``into`` with runs that lie end to end in one file, and check each block.

        Raises:
            ChunkCorrupt: bytes differ from what was written, or are missing.
        """
        views = [view for run, data in zip(runs, into, strict=True) for view in run.views(data)]
        at, found = runs[0].at, list[int]()
        for piece in _pieces(views, whole=runs[0].fd < 0):
            at = self._fill(runs, piece, at)
            found += map(checksum, piece)
        with self._lock:
            self.read_bytes += sum(map(len, into))
        self._compare(runs, found)

    def _fill(self, runs: Sequence[Run], views: list[memoryview], at: int) -> int:
        """Read from byte ``at``; return the byte after the last."""
        while views:
            try:
                count = opened.preadv(runs[0].fd, views, at)
            except FileNotFoundError as error:  # an object can't be held open as a file can
                raise Replaced(f"{self._told(runs[0], 0)}: removed while it was read") from error
            if count == 0:
                raise ChunkCorrupt(f"{self._told(runs[-1], 0)}: the file ends at {at}")
            at += count
            views = _after(views, count)
        return at

    def _compare(self, runs: Sequence[Run], found: Sequence[int]) -> None:
        if found == [one for run in runs for one in run.checksums()]:
            return
        seen = iter(found)
        for run in runs:
            for number in range(run.first, run.first + run.blocks):
                now, then = next(seen), run.manifest.checksums[number]
                if now != then:
                    told = f"expected checksum {then:016x}, found {now:016x}"
                    raise ChunkCorrupt(f"{self._told(run, number - run.first)}: {told}")

    def open(self, manifest: Manifest, file: int = 0) -> int:
        """File descriptor of a data file; the rank's own is as long as the index says.

        Raises:
            Replaced: it is gone.
            ChunkCorrupt: it is no regular file, has another length, or its header is damaged.
        """
        seen = (manifest.rank, file)
        if seen not in self._fds:
            path = self.checkpoint.data_path(manifest, file)
            if not isinstance(path, Place) and path.parent.is_symlink():
                raise ChunkCorrupt(f"{path.parent}: a symbolic link; only folders are followed")
            try:
                fd = opened.open_to_read(path)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise Replaced(f"{path}: named by {self.checkpoint.path}, but missing") from error
            self._stack.callback(opened.close, fd)
            self._fds[seen] = fd
            if not file:
                check_length(path, fd, manifest)
                if not self._patient:
                    check_header(path, fd, manifest)
        return self._fds[seen]

    def _told(self, run: Run, block: int) -> str:
        """File, key and offset of a block of a run, for messages."""
        manifest, number = run.manifest, run.first + block
        path = self.checkpoint.data_path(manifest, manifest.file_of(number))
        keys = self.checkpoint.table(manifest.group).keys
        key = keys[run.tensor] if run.tensor < len(keys) else "a PerRank tensor"
        return f"{path}: {key or 'shared bytes'} at offset {manifest.starts[number]}"


def _pieces(views: list[memoryview], *, whole: bool) -> Iterator[list[memoryview]]:
    """``views`` cut where a read and its check pay; ``whole`` leaves them, as one request."""
    if whole:
        yield views
        return
    first = size_bytes = 0
    for number, view in enumerate(views, start=1):
        size_bytes += len(view)
        if size_bytes >= _PIECE_BYTES or number - first == _MOST_BUFFERS or number == len(views):
            yield views[first:number]
            first, size_bytes = number, 0


def _after(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What of ``views`` is still to be filled after ``count`` bytes."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def check_length(path: Where, fd: int, manifest: Manifest) -> None:
    """Raise ChunkCorrupt unless a rank's own data file is as long as its manifest says."""
    found = opened.size(fd)
    if found != manifest.data_bytes:
        raise ChunkCorrupt(f"{path}: expected {manifest.data_bytes} bytes, found {found}")
    if manifest.header_bytes > found:
        raise ChunkCorrupt(f"{path}: a header of {manifest.header_bytes} bytes in {found}")


def check_header(path: Where, fd: int, manifest: Manifest) -> None:
    """Raise ChunkCorrupt if the header, which other readers trust, is not what was written."""
    found = checksum(opened.pread(fd, manifest.header_bytes, 0))
    if found != manifest.header_checksum:
        raise ChunkCorrupt(
            f"{path}: header at offset 0: expected checksum {manifest.header_checksum:016x}, "
            f"found {found:016x}"
        )
