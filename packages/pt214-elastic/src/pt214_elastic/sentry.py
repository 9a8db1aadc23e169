"""Looks at living workers that will do nothing more, without asking them.

A process in state T is stopped: seen twice it counts as lost. A debugger stops a process for one
look only. Whoever is found is to be killed, so that it can't wake later as a member of a world
that moved on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pt214_elastic import procs

STOPPED_LOOKS = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """One hung worker, and what tells so."""

    worker: procs.Worker
    evidence: dict[str, Any]


@dataclass
class Sentry:
    """Keeps what earlier looks have seen."""

    _stopped: dict[int, int] = field(default_factory=dict)  # looks in a row, by process id

    def look(self, workers: Iterable[procs.Worker]) -> list[Finding]:
        """Those of ``workers`` that have just proven to be hung."""
        by_pid = {worker.pid: worker for worker in workers}
        stopped = procs.stopped(list(by_pid))
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        looks = self._stopped.items()
        return [Finding(by_pid[pid], {"state": "T"}) for pid, n in looks if n == STOPPED_LOOKS]
