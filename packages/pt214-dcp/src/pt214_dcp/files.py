r"""The few ways this part touches files: new ones only, whole records, made durable.

A record is one JSON text inside an envelope that holds its digest::

    {"blake2b":"<32 hex digits>","body":<canonical JSON>}\n

Canonical means sorted keys and no spaces, so that each byte of the file is covered: by the digest
or by the fixed text around it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pt214_dcp.errors import BadPath, ChunkCorrupt

WRITE_SLICE_BYTES = 16 << 20  # of one pwrite: between two of them a save can be cancelled
RECORD_LIMIT_BYTES = 1 << 30  # a record is read whole, so a hostile one must end somewhere
_HEAD, _MIDDLE, _TAIL = b'{"blake2b":"', b'","body":', b"}\n"
_DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    """16 bytes that name a record's exact bytes."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def canonical(body: Any) -> bytes:
    """JSON with sorted keys and no spaces."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def pack(body: Any) -> bytes:
    """Put ``body`` into its envelope."""
    data = canonical(body)
    return b"".join((_HEAD, digest(data).hex().encode("ascii"), _MIDDLE, data, _TAIL))


def unpack(data: bytes, path: Path | str) -> Any:
    """Take the body out of its envelope.

    Raises:
        ChunkCorrupt: any byte differs from what ``pack`` wrote.
    """
    at = len(_HEAD) + 2 * _DIGEST_BYTES
    body = data[at + len(_MIDDLE) : -len(_TAIL)]
    if not (data.startswith(_HEAD) and data[at:].startswith(_MIDDLE) and data.endswith(_TAIL)):
        raise ChunkCorrupt(f"{path}: the envelope of this record is damaged ({len(data)} bytes)")
    wanted, found = data[len(_HEAD) : at].decode("latin-1"), digest(body).hex()
    if wanted != found:
        raise ChunkCorrupt(f"{path}: expected digest {wanted}, found {found} in {len(body)} bytes")
    return json.loads(body)


def read_record(path: Path) -> bytes:
    """All bytes of a regular file; symlinks are refused.

    Raises:
        FileNotFoundError: there is none.
        ChunkCorrupt: not a regular file, or too long for a record.
    """
    fd = open_to_read(path)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes > RECORD_LIMIT_BYTES:
            raise ChunkCorrupt(
                f"{path}: {size_bytes} bytes; a record has at most {RECORD_LIMIT_BYTES}"
            )
        data = os.pread(fd, size_bytes + 1, 0)
    finally:
        os.close(fd)
    if len(data) != size_bytes:
        raise ChunkCorrupt(f"{path}: expected {size_bytes} bytes, found {len(data)}")
    return data


def read_range(path: Path, at: int, size_bytes: int) -> bytes:
    """Up to ``size_bytes`` bytes of a regular file from byte ``at``; fewer where it ends.

    Raises:
        FileNotFoundError: there is none.
    """
    fd = open_to_read(path)
    try:
        return os.pread(fd, size_bytes, at)
    finally:
        os.close(fd)


def open_to_read(path: Path) -> int:
    """File descriptor of a regular file that is no symlink."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise  # "there is none": the caller knows what that means
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ChunkCorrupt(f"{path}: a symbolic link; only regular files are read") from error
        raise BadPath(error.errno, f"can't read: {error.strerror}", str(path)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ChunkCorrupt(f"{path}: not a regular file")
    return fd


def write_new(path: Path, data: memoryview | bytes, check: Callable[[], None]) -> None:
    """Write ``data`` to a file that must not exist, and wait until the disk has it.

    Args:
        path: the new file.
        data: its bytes.
        check: called between slices; it may raise to stop the write.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        view, at = memoryview(data), 0
        while at < len(view):
            check()
            at += os.pwrite(fd, view[at : at + WRITE_SLICE_BYTES], at)
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make names created, renamed or removed in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Create ``path`` and what is missing above it, each name durable in its parent."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)  # another rank may have been faster
    sync_folder(path.parent)
