"""Find and remove what killed savers left: generations that nothing names.

    changed lately      kept, by the file system's own clock
    old, or of a time to come   watched, by a clock that never jumps: kept if it changes
    else                taken away

What a root record names is never touched. How a live saver shows itself, and what happens to one
that is taken for dead, see ``leftovers``.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pt214_dcp import leftovers
from pt214_dcp.errors import NotACheckpoint
from pt214_dcp.exchange import TIMEOUT_S
from pt214_dcp.root import COMMIT, GENERATION

logger = logging.getLogger(__name__)
QUIET_S = 2 * TIMEOUT_S  # a saver gives up after its timeout
_TEMPORARY = re.compile(rf"{re.escape(COMMIT)}\.{GENERATION.pattern}")  # of earlier releases


@dataclass(slots=True)
class Repaired:
    """What ``repair`` found.

    Attributes:
        removed: leftovers that were removed, or would be.
        kept: leftovers left alone, each with the reason.
        size_bytes: of what was removed.
    """

    removed: list[Path] = field(default_factory=list)
    kept: dict[Path, str] = field(default_factory=dict)
    size_bytes: int = 0


def repair(path: Path, *, quiet_s: float = QUIET_S, dry_run: bool = False) -> Repaired:
    """Remove leftovers of killed saves from the checkpoint at ``path``.

    Takes 15 seconds where there is something to remove: it is watched first.

    Args:
        path: folder of a checkpoint, or where one was to be.
        quiet_s: leave alone what changed within so many seconds by the file system's clock, and
            watch the rest for so long, 15 at most: its saver may live. 0 is for when none can.
        dry_run: only tell.

    Raises:
        ChunkCorrupt: the root record is damaged, so what it names can't be known.
        NotACheckpoint: ``path`` is no folder.
    """
    return repair_all([path], quiet_s=quiet_s, dry_run=dry_run)


def repair_all(
    paths: Sequence[Path], *, quiet_s: float = QUIET_S, dry_run: bool = False
) -> Repaired:
    """``repair`` of several checkpoints, all of them watched at once."""
    found = Repaired()
    suspects: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise NotACheckpoint(f"{path}: no folder")
        leftovers.named(path)  # raises where it can't be known
        taken = leftovers.taken(path)
        _count(found, taken)
        if taken and not dry_run:
            leftovers.finish_taken(path)
        suspects += _suspects(path, quiet_s, found)
    for entry in _unchanged(suspects, min(quiet_s, leftovers.WATCH_S), found):
        _count(found, [entry])
        if not dry_run and not _remove(entry):
            found.removed.remove(entry)
            found.kept[entry] = "it was committed at this moment"
    found.removed.sort()
    return found


def _suspects(path: Path, quiet_s: float, found: Repaired) -> list[Path]:
    """What is not young by the file system's clock."""
    records = [entry for entry in path.iterdir() if _TEMPORARY.fullmatch(entry.name)]
    entries = [*leftovers.unnamed(path), *records]
    now_s = leftovers.clock_s(path) if entries and quiet_s > 0 else None
    suspects = []
    for entry in entries:
        age = leftovers.age_s(entry, now_s)
        if age is not None and age < quiet_s:
            found.kept[entry] = f"changed {age:.0f} s ago: its saver may still write"
        else:
            suspects.append(entry)
    return suspects


def _unchanged(suspects: Sequence[Path], watch_s: float, found: Repaired) -> Iterable[Path]:
    """Those that show no sign of life for so long."""
    if not suspects or watch_s <= 0:
        return suspects
    logger.info("watching %d leftovers for %.0f s", len(suspects), watch_s)
    watch = leftovers.Watch()
    for entry in suspects:
        watch.quiet_s(entry)
    time.sleep(watch_s)
    still = []
    for entry in suspects:
        if watch.quiet_s(entry) > 0:
            still.append(entry)
        else:
            found.kept[entry] = "it changes: its saver lives"
    return still


def _count(found: Repaired, entries: Iterable[Path]) -> None:
    for entry in entries:
        found.removed.append(entry)
        found.size_bytes += _size(entry)


def _size(entry: Path) -> int:
    """Bytes that removing ``entry`` frees: a file with another link stays."""
    files = list(entry.iterdir()) if entry.is_dir() else [entry]
    return sum(file.lstat().st_size for file in files if file.lstat().st_nlink == 1)


def _remove(entry: Path) -> bool:
    """Whether it is gone; not if its saver committed it just now."""
    if _TEMPORARY.fullmatch(entry.name):
        entry.unlink(missing_ok=True)
    elif not leftovers.take_away(entry):
        return False
    logger.info("removed %s, which no record names", entry)
    return True
