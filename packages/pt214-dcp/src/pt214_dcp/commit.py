"""The only commit: rename ``COMMIT.json`` into place, after all it names is durable.

    gen folders durable -> path fsynced -> temporary record fsynced -> rename -> path fsynced

A crash before the rename leaves the old checkpoint and a folder that nobody names; after it, the
new one. What the old record named is removed only then.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from pt214_dcp import files
from pt214_dcp.errors import CheckpointError, SaveFailed
from pt214_dcp.manifest import (
    COMMIT,
    Commit,
    RankRecord,
    data_name,
    manifest_name,
    pack_commit,
    read_commit,
)

logger = logging.getLogger(__name__)


def commit(path: Path, generation: str, ranks: Sequence[RankRecord]) -> None:
    """Make ``generation`` the checkpoint at ``path``.

    Raises:
        SaveFailed: files of a rank are not seen here, so ``path`` is not one shared folder.
        OSError: what the disk answers.
    """
    folder = path / generation
    for rank, record in enumerate(ranks):
        _check_seen(folder / data_name(rank), rank, record.data_bytes)
        _check_seen(folder / manifest_name(rank), rank, record.manifest_bytes)
    files.sync_folder(folder)
    files.sync_folder(path)  # the generation's name must be durable before a record names it
    temporary = path / f"{COMMIT}.{generation}"
    try:
        files.write_new(temporary, pack_commit(Commit(generation, tuple(ranks))), lambda: None)
        os.rename(temporary, path / COMMIT)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    files.sync_folder(path)


def committed(path: Path) -> str | None:
    """The generation committed at ``path``; None where there is none that can be read."""
    try:
        return read_commit(path).generation
    except CheckpointError:
        return None


def remove_old(path: Path, previous: str | None, stale_s: float) -> None:
    """After a commit: remove what it replaced, and what savers left that died long ago.

    Args:
        path: the checkpoint.
        previous: the generation that the old record named.
        stale_s: a generation that nobody names and nobody changed for so long is a dead saver's:
            a live one gives up within its timeout.
    """
    current = committed(path)
    for folder in path.glob("gen-*"):
        if folder.name == current:
            continue
        try:
            old = time.time() - folder.stat().st_mtime > stale_s
        except OSError:  # another saver was faster
            continue
        if folder.name == previous or old:
            discard(path, folder.name)


def discard(path: Path, generation: str) -> None:
    """Remove a generation that no record names; never an error, space is all it costs."""
    (path / f"{COMMIT}.{generation}").unlink(missing_ok=True)
    shutil.rmtree(path / generation, ignore_errors=True)
    if (path / generation).exists():
        logger.warning("could not remove %s; delete it by hand", path / generation)


def _check_seen(file: Path, rank: int, size_bytes: int) -> None:
    found = file.stat().st_size if file.is_file() else None
    if found != size_bytes:
        raise SaveFailed(
            f"{file}: rank {rank} wrote {size_bytes} bytes, rank 0 sees "
            f"{'no file' if found is None else found}; all ranks must share this folder"
        )
