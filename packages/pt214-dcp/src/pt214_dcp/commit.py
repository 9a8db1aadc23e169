"""The only commit: rename ``COMMIT.json`` into place, after all it names is durable.

    gen folders durable -> path fsynced -> gen-<uuid>/COMMIT.json fsynced
                                       -> renamed to path/COMMIT.json -> path fsynced

A crash before the rename leaves the old checkpoint and a folder that nobody names; after it, the
new one. What the old record named is removed only then. The record is written inside its
generation, so that a save whose generation is taken away as a leftover can't commit.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pt214_dcp import files, leftovers
from pt214_dcp.checkpoint import read_commit
from pt214_dcp.errors import CheckpointError, SaveFailed
from pt214_dcp.manifest import manifest_name
from pt214_dcp.rank_files import Report
from pt214_dcp.root import COMMIT, GENERATION, INDEX, Commit, pack_commit, pack_index, unpack_commit
from pt214_dcp.stores.place import Place, Where, sync_folder, write_new

logger = logging.getLogger(__name__)
_SEEN_S = 10.0  # how late a network file system may show a name
_WATCH = leftovers.Watch()  # of what this process met at the paths that it saves to


@dataclass(frozen=True, slots=True)
class Seen:
    """What rank 0 found at the path when its save began; in a store, no other may be replaced.

    Attributes:
        generation: that the root record named; None if there was none, or a damaged one.
        version: of the root record, as the store has it.
    """

    generation: str | None = None
    version: str | None = None


def seen(path: Where) -> Seen:
    """Look at the root record before a save; a file system has no versions, so only a store is."""
    if not isinstance(path, Place):
        return Seen()
    data, version = path.store.read_root((path / COMMIT).key)
    if version is None:
        return Seen()
    try:
        return Seen(unpack_commit(data, str(path / COMMIT)).generation, version)
    except CheckpointError:  # whatever it is, it may be replaced
        return Seen(None, version)


def previous(path: Where, found: Seen) -> str | None:
    """The generation that a commit now would replace."""
    return found.generation if isinstance(path, Place) else committed(path)


def commit(path: Where, generation: str, reports: Mapping[int, Report], found: Seen) -> Commit:
    """Make ``generation`` the checkpoint at ``path``, and return its root record.

    Args:
        path: folder of the checkpoint.
        generation: folder in it that all ranks have written to.
        reports: of every rank.
        found: what lay there when the save began.

    Raises:
        CommitConflict: in a store, something else lies there now.
        SaveFailed: files of a rank are not seen here, so ``path`` is not one shared folder.
        OSError: what the disk answers.
    """
    folder = path / generation
    _check_seen(folder, len(reports))
    records = [reports[rank].record for rank in range(len(reports))]
    index, pages = pack_index(records)
    write_new(folder / INDEX, index, lambda: None)
    tables = {report.record.group: report.table for report in reports.values() if report.table}
    size_bytes = sum(record.data_bytes + record.manifest_bytes for record in records)
    size_bytes += len(index) + sum(table.size_bytes for table in tables.values())
    root = Commit(
        generation, len(records), tuple(tables[group] for group in sorted(tables)), pages,
        size_bytes,
    )  # fmt: skip
    sync_folder(folder)
    if isinstance(path, Place):
        path.store.replace_root((path / COMMIT).key, pack_commit(root), found.version)
    else:
        _rename(path, generation, root)
    return root


def _rename(path: Path, generation: str, root: Commit) -> None:
    files.sync_folder(path)  # the generation's name must be durable before a record names it
    record = path / generation / COMMIT
    try:
        files.write_new(record, pack_commit(root), lambda: None)
        os.rename(record, path / COMMIT)
    except FileNotFoundError as error:
        raise SaveFailed(
            f"{path / generation} was taken away before its commit, as by a repair that took this "
            "save for a dead one; what lay at the path before lies there still: save again"
        ) from error
    files.sync_folder(path)


def committed(path: Where) -> str | None:
    """The generation committed at ``path``; None where there is none that can be read."""
    try:
        return read_commit(path).generation
    except CheckpointError:
        return None


def remove_old(path: Where, previous: str | None, stale_s: float) -> None:
    """After a commit: remove what it replaced, and what savers left that died long ago.

    Args:
        path: the checkpoint.
        previous: the generation that the old record named.
        stale_s: a generation that nobody names and nobody changed for so long is a dead saver's:
            a live one gives up within its timeout.

    Raises:
        CheckpointError: the root record can't be read.
        OSError: what the disk answers.
    """
    if isinstance(path, Place):
        _remove_old_objects(path, previous, stale_s)
        return
    leftovers.finish_taken(path)
    now_s = leftovers.clock_s(path)
    for folder in leftovers.unnamed(path):
        if folder.name == previous or _dead(folder, now_s, stale_s):
            leftovers.take_away(folder)
    _WATCH.forget(path)


def _dead(folder: Path, now_s: float | None, stale_s: float) -> bool:
    """Old by the file system's clock and quiet since an earlier save, or quiet for all the time."""
    quiet, age = _WATCH.quiet_s(folder), leftovers.age_s(folder, now_s)
    old = age is None or age > stale_s
    return quiet > stale_s or (old and quiet > leftovers.WATCH_S)


def discard(path: Where, generation: str) -> None:
    """Remove a generation that no record names; never an error, space is all it costs."""
    if isinstance(path, Place):
        names = [entry.name for entry in path.store.list((path / generation).key)]
        path.store.delete(names)
        return
    try:
        leftovers.take_away(path / generation)
        path.rmdir()  # empty where the save made it: nothing is left of what failed
    except (CheckpointError, OSError) as error:
        if (path / generation).exists():
            logger.warning("could not remove %s: %s", path / generation, error)


def _remove_old_objects(path: Place, previous: str | None, stale_s: float) -> None:
    """As ``remove_old``, by the store's clock: the root's time is now."""
    current, begin = committed(path), len(path.key) + 1 if path.key else 0
    latest: dict[str, float] = {}
    names: dict[str, list[str]] = {}
    now = 0.0
    for entry in path.store.list(path.key):
        first, _, rest = entry.name[begin:].partition("/")
        if first == COMMIT:
            now = entry.modified_s
        elif rest and GENERATION.fullmatch(first) and first != current:
            latest[first] = max(latest.get(first, 0.0), entry.modified_s)
            names.setdefault(first, []).append(entry.name)
    for generation, changed in latest.items():
        if generation == previous or now - changed > stale_s:
            path.store.delete(names[generation])


def _names_in(folder: Where) -> set[str]:
    if isinstance(folder, Place):
        return {entry.name.rpartition("/")[2] for entry in folder.store.list(folder.key)}
    return set(os.listdir(folder))


def _check_seen(folder: Where, world_size: int) -> None:
    """One listing, not a look at each file: names are enough to tell that the folder is shared."""
    wanted = {manifest_name(rank): rank for rank in range(world_size)}
    until = time.monotonic() + _SEEN_S
    while missing := wanted.keys() - _names_in(folder):
        if time.monotonic() > until:
            ranks = sorted(wanted[name] for name in missing)
            told = f"{ranks[:10]}{' and more' if len(ranks) > 10 else ''}"
            raise SaveFailed(
                f"{folder}: rank 0 sees no files of ranks {told}, which say that they wrote them; "
                "all ranks must share this folder"
            )
        time.sleep(0.1)  # a network file system may show new names late
