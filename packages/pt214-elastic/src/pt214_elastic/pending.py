"""Collectives in flight whose waiters a fault frees, even where gloo itself never returns.

Shutting a gloo socket nearly always ends the operation that blocks on it, but not always: an
operation posted while its peers' sockets close can stay pending until its timeout. So nobody
waits for gloo's own future, only for one of ours, which is completed by whoever comes first: the
operation, or the news that its epoch is broken. What an abandoned operation still writes goes to
a buffer that nobody reads: a ballot, or a bucket of a DDP wrapper that is thrown away.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

ABANDONED = "gloo: a rank was lost; the operation is abandoned"


class Pending:
    """The operations of this process that somebody may be waiting for.

    Args:
        is_broken: whether the current epoch is broken.
    """

    def __init__(self, is_broken: Callable[[], bool]) -> None:
        self._is_broken = is_broken
        self._lock = threading.Lock()
        self._open: dict[int, Callable[[], None]] = {}
        self._count = 0

    def follow(
        self, work: dist.Work, finish: Callable[[torch.Tensor], Any]
    ) -> torch.futures.Future[Any]:
        """A future of ``finish(result of work)``; it fails when the epoch breaks.

        Raises (from the future's ``wait``):
            RuntimeError: the operation failed, or was abandoned.
        """
        ours: torch.futures.Future[Any] = torch.futures.Future()
        theirs = work.get_future()
        taken = threading.Lock()  # by the first of the two that may complete it
        with self._lock:
            self._count += 1
            number = self._count
            self._open[number] = lambda: complete(None)

        def complete(done: Any) -> None:
            if taken.acquire(blocking=False):
                with self._lock:
                    self._open.pop(number, None)
                ours.set_result(done)

        def value(future: torch.futures.Future[Any]) -> Any:
            done = future.value()
            if done is None:
                raise RuntimeError(ABANDONED)
            return finish(done.value()[0])  # raises what the operation raised

        result = ours.then(value)
        theirs.add_done_callback(complete)
        if self._is_broken():  # before the operation was in the list
            complete(None)
        return result

    def abandon(self) -> None:
        """The epoch is broken: free every waiter."""
        with self._lock:
            waiting = list(self._open.values())
        for complete in waiting:
            complete()
