"""A meter for long work: tqdm's bar where it is installed, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Told = Callable[[int, int], None]
_EVERY_S = 1.0


@contextmanager
def meter(progress: bool | Told, title: str) -> Iterator[Told | None]:
    """What to call with bytes done and bytes in all.

    Args:
        progress: False for nothing, True for a meter on stderr, or the caller's own function.
        title: in front of the meter.
    """
    if callable(progress):
        yield progress
    elif not progress:
        yield None
    else:
        bar = _Bar(title)
        try:
            yield bar.tell
        finally:
            bar.close()


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
