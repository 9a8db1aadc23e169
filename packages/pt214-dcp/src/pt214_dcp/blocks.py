"""Write blocks to a file, each with its checksum: what the writer process and threads share.

Imports nothing but the standard library and xxhash: the writer process must start in milliseconds
and stay small. XXH3 is several times faster than a crc, and a load's time is the sum of both.

Source: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_digest

WRITE_SLICE_BYTES = 16 << 20  # of one pwrite: between two of them a save can be cancelled
_WRITEBACK_BYTES = 1 << 20  # less is not worth a call
_SYNC_FILE_RANGE_WRITE = 2
_MOST_BUFFERS = 1000  # of one pwritev; IOV_MAX is 1024 on Linux and macOS

Known = Mapping[bytes, tuple[int, int]]  # hash -> file, offset of a block already stored


@dataclass(slots=True)
class Written:
    """What is known of blocks once they are written, one entry a block.

    Attributes:
        checksums: of each.
        hashes: 16 bytes of each, or nothing.
        files: 0 for this file, else the file of a block already stored; empty without ``known``.
        offsets: in that file; empty without ``known``.
    """

    checksums: array[int] = field(default_factory=lambda: array("Q"))
    hashes: bytearray = field(default_factory=bytearray)
    files: array[int] = field(default_factory=lambda: array("H"))
    offsets: array[int] = field(default_factory=lambda: array("q"))

    def extend(self, other: Written) -> None:
        """Append what is known of later blocks."""
        self.checksums.extend(other.checksums)
        self.hashes.extend(other.hashes)
        self.files.extend(other.files)
        self.offsets.extend(other.offsets)


def checksum(data: Any) -> int:
    """XXH3 of 64 bits with seed 0, against bytes that change by chance."""
    found: int = xxh3_64_intdigest(data)
    return found


def digest(data: Any) -> bytes:
    """XXH3 of 128 bits with seed 0: blocks of equal digests are taken for equal."""
    found: bytes = xxh3_128_digest(data)
    return found


def write_blocks(
    fd: int,
    blocks: Sequence[memoryview],
    at: int,
    known: Known | None,
    check: Callable[[], None],
) -> tuple[Written, int]:
    """Write ``blocks`` end to end from byte ``at``, leaving out those already ``known``.

    Args:
        fd: of the file.
        blocks: their bytes.
        at: where the first goes.
        known: stored blocks by their hash; None writes all and hashes none.
        check: called between writes; raises to stop.

    Returns:
        What is known of the blocks, and the byte after the last one written.
    """
    written, new = sort_out(blocks, at, known)
    return written, write_all(fd, new, at, check)


def sort_out(
    blocks: Sequence[memoryview], at: int, known: Known | None
) -> tuple[Written, Sequence[memoryview]]:
    """Checksums of ``blocks``, and which of them are to be written from byte ``at``."""
    written = Written()
    written.checksums.extend(map(checksum, blocks))
    if known is None:
        return written, blocks
    new, end = [], at
    for block in blocks:
        name = digest(block)
        written.hashes += name
        file, offset = known.get(name, (0, end))
        if not file:
            new.append(block)
            end += len(block)
        written.files.append(file)
        written.offsets.append(offset)
    return written, new


def write_all(fd: int, buffers: Sequence[memoryview], at: int, check: Callable[[], None]) -> int:
    """``pwritev`` until all is written; return the byte after the last.

    Raises:
        OSError: what the disk answers.
    """
    first = 0
    while first < len(buffers):
        last, size = first, 0
        while last < len(buffers) and last - first < _MOST_BUFFERS and size < WRITE_SLICE_BYTES:
            size += len(buffers[last])
            last += 1
        check()
        end = _write_slice(fd, buffers[first:last], at)
        if size >= _WRITEBACK_BYTES:
            start_writeback(fd, at, end - at)
        at, first = end, last
    return at


def start_writeback(fd: int, at: int, size_bytes: int) -> None:
    """Have the disk begin with these bytes while the next ones are copied; no promise, no error.

    Else it begins at the fsync, and the time of a save is that of the copy and of the disk's.
    Source: https://man7.org/linux/man-pages/man2/sync_file_range.2.html
    """
    call = _sync_file_range()
    if call is not None:
        call(fd, at, size_bytes, _SYNC_FILE_RANGE_WRITE)


@functools.lru_cache(1)
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's call; None elsewhere."""
    try:
        import ctypes

        call = ctypes.CDLL(None).sync_file_range
    except (ImportError, OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    found: Callable[[int, int, int, int], int] = call
    return found


def _write_slice(fd: int, buffers: Sequence[memoryview], at: int) -> int:
    left = list(buffers)
    while left:
        count = os.pwritev(fd, left, at)
        if count == 0 and any(len(buffer) for buffer in left):
            raise OSError(f"wrote 0 of {sum(map(len, left))} bytes at offset {at}")
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left and count:  # a short write, as of a signal or a full disk: go on behind it
            left[0] = left[0][count:]
    return at
