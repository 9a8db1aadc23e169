"""The only commit: rename ``COMMIT.json`` into place, after all it names is durable.

    gen folders durable -> path fsynced -> temporary record fsynced -> rename -> path fsynced

A crash before the rename leaves the old checkpoint and a folder that nobody names; after it, the
new one. What the old record named is removed only then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from pt214_dcp import files
from pt214_dcp.checkpoint import read_commit
from pt214_dcp.errors import CheckpointError, SaveFailed
from pt214_dcp.manifest import manifest_name
from pt214_dcp.rank_files import Report
from pt214_dcp.root import COMMIT, INDEX, Commit, pack_commit, pack_index

logger = logging.getLogger(__name__)
_SEEN_S = 10.0  # how late a network file system may show a name


def commit(path: Path, generation: str, reports: Mapping[int, Report]) -> Commit:
    """Make ``generation`` the checkpoint at ``path``, and return its root record.

    Args:
        path: folder of the checkpoint.
        generation: folder in it that all ranks have written to.
        reports: of every rank.

    Raises:
        SaveFailed: files of a rank are not seen here, so ``path`` is not one shared folder.
        OSError: what the disk answers.
    """
    folder = path / generation
    _check_seen(folder, len(reports))
    records = [reports[rank].record for rank in range(len(reports))]
    index, pages = pack_index(records)
    files.write_new(folder / INDEX, index, lambda: None)
    tables = {report.record.group: report.table for report in reports.values() if report.table}
    size_bytes = sum(record.data_bytes + record.manifest_bytes for record in records)
    size_bytes += len(index) + sum(table.size_bytes for table in tables.values())
    root = Commit(
        generation, len(records), tuple(tables[group] for group in sorted(tables)), pages,
        size_bytes,
    )  # fmt: skip
    files.sync_folder(folder)
    files.sync_folder(path)  # the generation's name must be durable before a record names it
    temporary = path / f"{COMMIT}.{generation}"
    try:
        files.write_new(temporary, pack_commit(root), lambda: None)
        os.rename(temporary, path / COMMIT)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    files.sync_folder(path)
    return root


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
    with contextlib.suppress(OSError):
        path.rmdir()  # empty where the save made it: nothing is left of what failed
    if (path / generation).exists():
        logger.warning("could not remove %s; delete it by hand", path / generation)


def _check_seen(folder: Path, world_size: int) -> None:
    """One listing, not a look at each file: names are enough to tell that the folder is shared."""
    wanted = {manifest_name(rank): rank for rank in range(world_size)}
    until = time.monotonic() + _SEEN_S
    while missing := wanted.keys() - set(os.listdir(folder)):
        if time.monotonic() > until:
            ranks = sorted(wanted[name] for name in missing)
            told = f"{ranks[:10]}{' and more' if len(ranks) > 10 else ''}"
            raise SaveFailed(
                f"{folder}: rank 0 sees no files of ranks {told}, which say that they wrote them; "
                "all ranks must share this folder"
            )
        time.sleep(0.1)  # a network file system may show new names late
