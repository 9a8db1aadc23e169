"""Write one rank's files: data, then the manifest that names its checksums.

Order: data written and fsynced, manifest written and fsynced, folder fsynced. Only then may the
rank say that it is done. crc32c and pwrite release the GIL, so training goes on meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import crc32c

from pt214_dcp import files
from pt214_dcp.errors import SaveFailed
from pt214_dcp.manifest import (
    BLOCK_BYTES,
    Chunk,
    Manifest,
    RankRecord,
    TensorRecord,
    data_name,
    manifest_name,
    pack_manifest,
)
from pt214_dcp.staging import Staged
from pt214_dcp.state import Json

# What a full disk or a limit answers; the message then tells how much is needed.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_rank(
    folder: Path,
    rank: int,
    tree: Json,
    keys: Sequence[str],
    tensors: Sequence[TensorRecord],
    staged: Sequence[Staged],
    data: memoryview,
    check: Callable[[], None],
) -> RankRecord:
    """Write and make durable what ``rank`` holds; ``folder`` is the generation's.

    Args:
        folder: the generation; created where missing.
        rank: rank in the group that saves.
        tree: nesting and scalars on rank 0, else None.
        keys: path of each tensor of the state dict.
        tensors: dtype and global shape of each.
        staged: parts that this rank writes.
        data: their bytes.
        check: called often; raises to stop.

    Raises:
        SaveFailed: no room; the message has the bytes needed and free.
        OSError: what else the disk answers.
    """
    files.make_folder(folder)
    _check_room(folder, len(data))
    chunks = tuple(_chunk(part, keys[part.index], rank, data, check) for part in staged)
    manifest = Manifest(rank, len(data), tree, tuple(keys), tuple(tensors), chunks)
    packed = pack_manifest(manifest)
    try:
        files.write_new(folder / data_name(rank), data, check)
        files.write_new(folder / manifest_name(rank), packed, check)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise _no_room(folder, len(data) + len(packed), error.errno) from error
        raise
    files.sync_folder(folder)
    return RankRecord(len(packed), files.digest(packed), len(data))


def _chunk(part: Staged, key: str, rank: int, data: memoryview, check: Callable[[], None]) -> Chunk:
    stop = part.offset + part.size_bytes
    crcs = []
    for at in range(part.offset, stop, BLOCK_BYTES):
        check()
        crcs.append(crc32c.crc32c(data[at : min(at + BLOCK_BYTES, stop)]))
    return Chunk(key, part.held.box, rank, part.offset, part.size_bytes, tuple(crcs))


def _check_room(folder: Path, needed_bytes: int) -> None:
    """Say before the first byte that a save can't fit; the old checkpoint stays meanwhile."""
    if _free_bytes(folder) < needed_bytes:
        raise _no_room(folder, needed_bytes, errno.ENOSPC)


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _no_room(folder: Path, needed_bytes: int, code: int) -> SaveFailed:
    return SaveFailed(
        f"{folder}: {os.strerror(code)}: this rank needs {needed_bytes} bytes, "
        f"{_free_bytes(folder)} are free; the earlier checkpoint stays until the new one is whole"
    )
