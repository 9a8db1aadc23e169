"""A meter for long work: tqdm's bar where it is installed, else a line now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pt214_dcp.errors import BadOption

logger = logging.getLogger(__name__)
Told = Callable[[int, int], None]
Progress = bool | Told
_EVERY_S = 1.0


class Meter:
    """What to call with bytes done and bytes in all, from any thread.

    What the caller's own function raises is logged once, and it is called no more: a checkpoint is
    worth more than its meter.
    """

    def __init__(self, tell: Told, close: Callable[[], None] | None = None) -> None:
        self._tell: Told | None = tell
        self._close = close

    def __call__(self, done: int, total: int) -> None:
        """So much is done of so much."""
        if self._tell is None:
            return
        try:
            self._tell(done, total)
        except Exception:
            self._tell = None
            logger.exception("progress raised, so it is called no more; the work goes on")

    def close(self) -> None:
        """The work has ended."""
        if self._close is not None:
            self._close()


def meter_of(progress: Progress | None, title: str, *, rank: int = 0) -> Meter | None:
    """What to tell of one piece of work; nothing is shown until it is first called.

    Args:
        progress: False or None for nothing; True for a meter on stderr, of rank 0 alone; or the
            caller's own function, on every rank.
        title: in front of the meter.
        rank: of this process.

    Raises:
        BadOption: ``progress`` is none of these.
    """
    if callable(progress):
        return Meter(progress)
    if progress not in (None, False, True):
        raise BadOption(
            f"progress is {progress!r}; it must be True, False or a function of bytes done and "
            "bytes in all"
        )
    if not progress or rank:
        return None
    bar = _Bar(title)
    return Meter(bar.tell, bar.close)


@contextmanager
def meter(progress: Progress | None, title: str, *, rank: int = 0) -> Iterator[Meter | None]:
    """``meter_of``, closed at the end of the block."""
    found = meter_of(progress, title, rank=rank)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


class _Bar:
    def __init__(self, title: str) -> None:
        self._title, self._begin = title, time.monotonic()
        self._last = self._begin
        self._lock = threading.Lock()
        self._bar: Any = None

    def tell(self, done: int, total: int) -> None:
        with self._lock:
            try:
                self._tqdm(done, total)
            except ImportError:
                self._line(done, total)

    def _tqdm(self, done: int, total: int) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=self._title, leave=False)
        self._bar.update(done - self._bar.n)

    def _line(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < _EVERY_S and done < total:
            return
        self._last = now
        speed = done / max(now - self._begin, 1e-9) / 1e6
        percent = 100 * done // max(total, 1)
        print(f"{self._title}: {percent} %, {speed:.0f} MB/s", file=sys.stderr)  # noqa: T201  # asked for

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
