"""The life of one save, as its caller sees it.

STAGED --written--> COMMITTING --renamed--> DONE
|                    +---- error ---> FAILED
+---- error, cancel ----------------> FAILED
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable

from pt214_dcp.errors import SaveCancelled
from pt214_dcp.progress import Meter

logger = logging.getLogger(__name__)


class Phase(enum.Enum):
    """Where a save is."""

    STAGED = "staged"
    COMMITTING = "committing"
    DONE = "done"
    FAILED = "failed"


class SaveHandle:
    """An asynchronous save. Its tensors were copied before it was returned, or see ``overlap``.

    Attributes:
        path: where the checkpoint goes.
        blocked_s: seconds that the call took from training.
        durable_s: seconds from the call to the commit; None until then.
        rank_size_bytes: bytes of tensors that this rank writes.
        written_bytes: of those, how many are with the disk so far.
        size_bytes: bytes that all ranks wrote, manifests included; None until the commit.
    """

    def __init__(
        self,
        path: str,
        started: float,
        rank_size_bytes: int,
        progress: Meter | None = None,
    ) -> None:
        self.path = path
        self.blocked_s = 0.0
        self.durable_s: float | None = None
        self.rank_size_bytes = rank_size_bytes
        self.size_bytes: int | None = None
        self._started = started
        self._lock = threading.Lock()
        self._phase = Phase.STAGED
        self._cancelled = threading.Event()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.written_bytes = 0
        self._progress = progress
        self._staged: Callable[[], object] | None = None
        self._after: list[Callable[[], None]] = []
        self._asked = False  # somebody has seen how it ended

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the checkpoint is committed on all ranks.

        Raises:
            TimeoutError: it still runs after ``timeout_s``.
            SaveFailed: it was not committed; what lay at the path before lies there still.
        """
        error = self.exception(timeout_s)
        if error is not None:
            raise error

    def wait_staged(self) -> None:
        """Block until every tensor is copied: at once, unless the save was given ``overlap``."""
        if self._staged is not None:
            self._staged()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Block until it ends; return what went wrong, or None.

        Raises:
            TimeoutError: it still runs after ``timeout_s``.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the save to {self.path} still runs after {timeout_s} s")
        self._asked = True
        return self._error

    def cancel(self) -> bool:
        """Abandon the save: its thread ends soon, and this rank commits nothing from now on.

        Returns:
            False if it had ended or this rank had begun to commit: then it can't be stopped.
        """
        with self._lock:
            if self._phase is not Phase.STAGED:
                return False
            self._cancelled.set()
            return True

    def check(self) -> None:
        """Raise SaveCancelled if ``cancel`` was called."""
        if self._cancelled.is_set():
            raise SaveCancelled(f"the save to {self.path} was cancelled; nothing was committed")

    def pause(self, seconds: float) -> None:
        """Sleep, unless cancelled."""
        self._cancelled.wait(seconds)
        self.check()

    def lazy(self, wait: Callable[[], object]) -> None:
        """Copies go on after the call; ``wait`` waits for them."""
        self._staged = wait

    def staged_after_call(self) -> None:
        """The call returns now."""
        self.blocked_s = time.monotonic() - self._started

    def wrote(self, size_bytes: int) -> None:
        """Count bytes written, and tell who asked."""
        self.written_bytes += size_bytes
        if self._progress is not None:
            self._progress(self.written_bytes, self.rank_size_bytes)

    def begin_commit(self) -> None:
        """From here on ``cancel`` comes too late."""
        with self._lock:
            self.check()
            self._phase = Phase.COMMITTING

    def on_commit(self, call: Callable[[], None]) -> None:
        """Have ``call`` run once it is committed: by its thread, or now if it already is."""
        with self._lock:
            if self._phase is not Phase.DONE:
                self._after.append(call)
                return
        call()

    def finish(self, size_bytes: int | None, error: BaseException | None) -> None:
        """The last word of the background thread."""
        with self._lock:
            self._phase = Phase.DONE if error is None else Phase.FAILED
        if self._progress is not None:
            self._progress.close()
        if error is None:
            for call in self._after:
                try:
                    call()
                except OSError as failed:  # the checkpoint is safe whatever tidying meets
                    logger.warning("%s: after the commit: %s", self.path, failed)
        self._error, self.size_bytes = error, size_bytes
        self.durable_s = time.monotonic() - self._started if error is None else None
        self._ended.set()

    @property
    def began_commit(self) -> bool:
        """Whether this rank may have renamed the root record."""
        return self._phase is not Phase.STAGED

    @property
    def told(self) -> bool:
        """Whether somebody has asked how it ended, and was answered."""
        return self._asked

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` took effect."""
        return self._cancelled.is_set()

    @property
    def unseen(self) -> BaseException | None:
        """The error of a save that nobody has asked about; None while it runs."""
        return None if self._asked or not self._ended.is_set() else self._error
