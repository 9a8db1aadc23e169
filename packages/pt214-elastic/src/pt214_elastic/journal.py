"""Where a job's events go: a file of JSON lines, then the caller's callback.

    note(event) -> file (written and flushed) -> on_event(event)
                                                   |  raised: kept in ``failure``; no more calls

A callback runs in the middle of handling a worker's message. Its exception must reach neither the
protocol, which would blame that message, nor end the loop before the workers are gone: it is kept
here, and the launcher ends the job and raises it at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pt214_elastic.events import Event

log = logging.getLogger("pt214_elastic.journal")


class Journal:
    """Writes events down and tells the caller.

    Args:
        on_event: called with each event, in order.
        path: gets the same events, one JSON line each; an old file is replaced.
    """

    def __init__(self, on_event: Callable[[Event], None] | None, path: Path | None) -> None:
        self.failure: Exception | None = None
        self._on_event = on_event
        self._path = path
        self._file: IO[str] | None = None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the file open.

        Raises:
            OSError: it can't be written.
        """
        if self._path is None:
            yield
            return
        with open(self._path, "w", encoding="utf-8") as self._file:
            yield
        self._file = None

    def note(self, event: Event) -> None:
        """Write one event and tell the caller, unless the caller's callback failed before."""
        log.debug("%s", event)
        if self._file is not None:
            self._file.write(event.to_json() + "\n")
            self._file.flush()
        if self._on_event is None or self.failure is not None:
            return
        try:
            self._on_event(event)
        except Exception as error:
            log.error("on_event raised at a %s event; the job ends: %r", event.kind, error)
            self.failure = error
