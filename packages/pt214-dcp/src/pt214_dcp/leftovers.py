"""What killed savers leave beside a checkpoint: who still lives, and how the rest is taken away.

    a saver     makes gen-<uuid>, and sets the folder's time every few seconds while it lives
    a cleaner   gen-<uuid> -> gone-<uuid> -> reads the root record again -> removes, or puts back

No clock of this host decides. A saver lives while its files change before one's eyes, as timed by
a clock that never jumps; the file system's own clock only tells what needs no watching. If a
cleaner still takes a live save's folder, the save fails at its next step, since that name is gone:
it can't commit what is half removed. What was committed meanwhile is named by the record, and is
put back.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pt214_dcp.checkpoint import read_commit
from pt214_dcp.errors import ChunkCorrupt, NotACheckpoint
from pt214_dcp.root import COMMIT, GENERATION
from pt214_dcp.stores.place import Where

logger = logging.getLogger(__name__)
BEAT_S = 5.0
WATCH_S = 3 * BEAT_S  # two beats may be late
# The clock of a file system of another host may lag, and has ticks: so little is not the future.
_SLACK_S = 60.0
_GONE = re.compile(r"gone-[0-9a-f]{32}")


@contextlib.contextmanager
def alive(generation: Where) -> Iterator[None]:
    """Show that this saver lives, also while it waits for others and writes nothing."""
    if not isinstance(generation, Path):
        yield
        return
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with contextlib.suppress(OSError):  # not made yet, or taken away
                os.utime(generation)

    threading.Thread(target=beat, name="pt214_dcp alive", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def named(path: Path) -> str | None:
    """The generation that the root record at ``path`` names; None if there is no record.

    Raises:
        ChunkCorrupt: there is one, and what it names can't be known.
    """
    try:
        return read_commit(path).generation
    except NotACheckpoint as error:
        if (path / COMMIT).exists():  # of another version: what it names is unknown, too
            raise ChunkCorrupt(str(error)) from error
        return None


def unnamed(path: Path) -> list[Path]:
    """Generations at ``path`` that its root record does not name, in the order of their names.

    Raises:
        ChunkCorrupt: as ``named``.
    """
    # Listed first: what is committed in between is known to be named.
    found = sorted(entry for entry in path.iterdir() if GENERATION.fullmatch(entry.name))
    current = named(path)
    return [entry for entry in found if entry.name != current]


def take_away(generation: Path) -> bool:
    """Remove a generation that nobody names, or leave it if its saver commits it at this moment.

    Returns:
        False if it was committed, so it stays.

    Raises:
        ChunkCorrupt: the root record can't be read, so it stays under its other name.
        OSError: what the disk answers.
    """
    gone = generation.with_name(generation.name.replace("gen-", "gone-"))
    try:
        os.rename(generation, gone)
    except FileNotFoundError:  # another cleaner was faster
        return True
    return _end(gone)


def finish_taken(path: Path) -> list[Path]:
    """End what killed cleaners began at ``path``; return what was removed.

    Raises:
        ChunkCorrupt: as ``named``.
    """
    found = sorted(entry for entry in path.iterdir() if _GONE.fullmatch(entry.name))
    return [entry for entry in found if _end(entry)]


def taken(path: Path) -> list[Path]:
    """What ``finish_taken`` would remove.

    Raises:
        ChunkCorrupt: as ``named``.
    """
    found = sorted(entry for entry in path.iterdir() if _GONE.fullmatch(entry.name))
    current = named(path)
    return [entry for entry in found if _generation(entry).name != current]


def is_ours(entry: Path) -> bool:
    """Whether a folder is a generation, or was one."""
    return bool(GENERATION.fullmatch(entry.name) or _GONE.fullmatch(entry.name))


def _end(gone: Path) -> bool:
    """Remove ``gone``, or put it back if it is named: no save can commit it from now on."""
    generation = _generation(gone)
    if named(gone.parent) == generation.name:
        with contextlib.suppress(FileNotFoundError):  # another cleaner was faster
            os.rename(gone, generation)
        return False
    shutil.rmtree(gone, ignore_errors=True)
    if gone.exists():
        logger.warning("could not remove %s; delete it by hand", gone)
    return True


def _generation(gone: Path) -> Path:
    return gone.with_name(gone.name.replace("gone-", "gen-"))


def clock_s(path: Path) -> float | None:
    """The time of the file system that holds ``path``; None where nothing can be written.

    It may be another host's. The file has no name, so a kill leaves nothing.
    """
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return None


def age_s(entry: Path, now_s: float | None) -> float | None:
    """Seconds since ``entry`` changed; None if that is in the future, so that the clock jumped."""
    if now_s is None:
        return None
    age = now_s - max(changed for _, _, changed in _signs(entry)) / 1e9
    return max(age, 0.0) if age > -_SLACK_S else None


class Watch:
    """For how long, by a clock that never jumps, leftovers have shown no sign of life."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[object, float]] = {}
        self._lock = threading.Lock()

    def quiet_s(self, entry: Path) -> float:
        """Seconds since ``entry`` was first seen as it is now; 0 at the first look."""
        signs, now = _signs(entry), time.monotonic()
        with self._lock:
            before, since = self._seen.setdefault(entry, (signs, now))
            if before != signs:
                self._seen[entry] = (signs, now)
                return 0.0
        return now - since

    def forget(self, path: Path) -> None:
        """Forget what lies at ``path`` no longer."""
        with self._lock:
            for entry in [each for each in self._seen if each.parent == path]:
                if not entry.exists():
                    del self._seen[entry]


def _signs(entry: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of all that a saver touches."""
    found = []
    for each in [entry, *(entry.iterdir() if entry.is_dir() else ())]:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = each.lstat()
            found.append((each.name, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found)) or ((entry.name, 0, 0),)
