"""Where passes say what they did, for whoever listens: ``explain``, tests, the debug log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of one pass about one place in a graph."""

    where: str  # the graph node that ends the region
    pass_name: str
    what: str  # the verdict, in words
    detail: str = ""


_LISTENER: ContextVar[list[Decision] | None] = ContextVar("pt214_inductor_decisions", default=None)


@contextmanager
def listening() -> Iterator[list[Decision]]:
    """Collect every decision that this thread's compiles take inside the block."""
    decisions: list[Decision] = []
    token = _LISTENER.set(decisions)
    try:
        yield decisions
    finally:
        _LISTENER.reset(token)


def record(decision: Decision) -> None:
    """Tell the listener, if there is one, and the debug log."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.append(decision)
    log.debug(
        "%s at %s: %s %s", *(decision.pass_name, decision.where), decision.what, decision.detail
    )
