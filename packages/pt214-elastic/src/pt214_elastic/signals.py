"""SIGINT and SIGTERM as a call: a launcher ends its workers in order, whoever asks it to."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handled(stop: Callable[[int], None]) -> Iterator[None]:
    """Have ``stop(number)`` called for each; only the main thread can, elsewhere nothing is done.

    The handlers of before come back at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        stop(number)

    before = [signal.signal(number, handler) for number in NUMBERS]
    try:
        yield
    finally:
        for number, old in zip(NUMBERS, before, strict=True):
            signal.signal(number, old)
