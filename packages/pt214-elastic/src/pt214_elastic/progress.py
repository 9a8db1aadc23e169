"""A page of memory in which a worker writes where it stands, and which its launcher reads.

    int64[5]: moves | place | step | posted | base        position = (step, posted - base)

``posted`` counts the operations this rank has begun on the process group, by torch's own count, so
collectives inside DDP or SyncBatchNorm are seen as well as the vote; ``base`` is that count as the
step began. The main thread writes when it enters and leaves; a thread brings ``posted`` up to date
while the main thread blocks in a collective, which holds no interpreter lock.

Plain stores into a shared mapping cost no message, and reading them needs nothing of the worker:
one that hangs, with the interpreter's lock held even, need not answer. A value read half written
does no harm, as the launcher acts only on what has stayed the same for long.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pt214_elastic.hang import View, Where

log = logging.getLogger("pt214_elastic.progress")

CELLS = 5
PAGE_BYTES = 8 * CELLS
MOVES, PLACE, STEP, POSTED, BASE = range(CELLS)
PULSE_S = 0.25
PLACES = tuple(Where)  # a cell holds the index


class Progress:
    """The worker's end of its page; without a path it writes into memory of its own.

    Args:
        path: of the page's file, as the launcher made it.
        posted: tells how many operations this rank has begun.
    """

    def __init__(self, path: str, posted: Callable[[], int]) -> None:
        cells = _mapped(Path(path)) if path else memoryview(bytearray(PAGE_BYTES))
        self._cells = cells.cast("q")
        self._posted = posted
        self._ended = threading.Event()
        self._cells[MOVES] = 1  # 0: nobody writes here

    def enter(self, step: int) -> None:
        """A step begins."""
        self._cells[BASE] = self._cells[POSTED] = self._posted()
        self._cells[STEP] = step
        self._stand(Where.INSIDE)

    def leave(self) -> None:
        """A step ends."""
        self._stand(Where.OUTSIDE)

    @contextmanager
    def at_boundary(self) -> Iterator[None]:
        """This rank waits for the others between epochs or before the first step."""
        before = self._cells[PLACE]
        self._stand(Where.BOUNDARY)
        try:
            yield
        finally:
            self._stand(PLACES[before])

    def beat(self) -> None:
        """Bring the count of operations up to date."""
        self._cells[POSTED] = self._posted()

    def start_pulse(self) -> None:
        """Have a thread do so from now to the end of the process."""
        thread = threading.Thread(target=self._pulse, name="pt214-elastic-pulse", daemon=True)
        thread.start()

        def stop() -> None:  # at the interpreter's end a thread must not come back from C++
            self._ended.set()
            thread.join(PULSE_S)

        atexit.register(stop)

    def _pulse(self) -> None:
        while not self._ended.wait(PULSE_S):
            self.beat()

    def _stand(self, where: Where) -> None:
        self._cells[PLACE] = PLACES.index(where)
        self._cells[MOVES] += 1


class Page:
    """The launcher's end of one worker's page.

    Args:
        path: of the page's file; an old one is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = ""  # nothing to write to: this worker is not watched
        try:
            path.write_bytes(bytes(PAGE_BYTES))  # real blocks: a hole could fail the worker later
            self._cells = _mapped(path).cast("q")
            self.path = str(path)
        except OSError as error:
            log.warning("no page at %s, hangs of its worker are not seen: %s", path, error)

    def view(self) -> View | None:
        """Where the worker stands; ``None`` if it has not written yet."""
        if not self.path or self._cells[MOVES] == 0:
            return None
        moves, place, step, posted, base = self._cells.tolist()
        return View(PLACES[place], (step, posted - base), moves)


def _mapped(path: Path) -> memoryview:
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), PAGE_BYTES))
