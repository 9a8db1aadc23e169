"""Find and remove what killed savers left: generations and records that nothing names.

What a root record names is never touched. A generation that nobody names may be one that a saver is
still writing, so only what did not change for a while is removed.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from pt214_dcp.checkpoint import read_commit
from pt214_dcp.errors import ChunkCorrupt, NotACheckpoint
from pt214_dcp.exchange import TIMEOUT_S
from pt214_dcp.root import COMMIT, GENERATION

logger = logging.getLogger(__name__)
QUIET_S = 2 * TIMEOUT_S  # a saver gives up after its timeout
_TEMPORARY = re.compile(rf"{re.escape(COMMIT)}\.{GENERATION.pattern}")


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

    Args:
        path: folder of a checkpoint, or where one was to be.
        quiet_s: leave alone what changed within so many seconds: its saver may live.
        dry_run: only tell.

    Raises:
        ChunkCorrupt: the root record is damaged, so what it names can't be known.
        NotACheckpoint: ``path`` is no folder.
    """
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: no folder")
    try:
        current = read_commit(path).generation
    except NotACheckpoint as error:
        if (path / COMMIT).exists():  # of another version: what it names is unknown, too
            raise ChunkCorrupt(str(error)) from error
        current = ""
    found = Repaired()
    for entry in sorted(path.iterdir()):
        leftover = GENERATION.fullmatch(entry.name) or _TEMPORARY.fullmatch(entry.name)
        if not leftover or entry.name == current:
            continue
        quiet = time.time() - _last_change(entry)
        if quiet < quiet_s:
            found.kept[entry] = f"changed {quiet:.0f} s ago: its saver may still write"
            continue
        found.size_bytes += _size(entry)
        found.removed.append(entry)
        if not dry_run:
            _remove(entry)
            logger.info("removed %s, which no record names", entry)
    return found


def _last_change(entry: Path) -> float:
    entries = [entry, *entry.iterdir()] if entry.is_dir() else [entry]
    return max(each.lstat().st_mtime for each in entries)


def _size(entry: Path) -> int:
    """Bytes that removing ``entry`` frees: a file with another link stays."""
    files = list(entry.iterdir()) if entry.is_dir() else [entry]
    return sum(file.lstat().st_size for file in files if file.lstat().st_nlink == 1)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()
