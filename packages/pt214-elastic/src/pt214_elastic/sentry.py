"""Looks at living workers that will do nothing more, without asking them.

    state T, in two looks      stopped; a debugger stops a process for one look only
    all others wait for it     see ``hang``; looked at less often, as limits are long

Whoever is found is to be killed, so that it can't wake later as a member of a world that moved on.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pt214_elastic import cputime, hang, procs
from pt214_elastic.progress import Page

STOPPED_LOOKS = 2
LOOKS_PER_LIMIT = 4
LOOK_S = 1.0  # between looks for a hang, at most


@dataclass(frozen=True, slots=True)
class Finding:
    """One hung worker, and what tells so."""

    worker: procs.Worker
    evidence: dict[str, Any]


class Sentry:
    """Keeps each worker's page and what earlier looks have seen."""

    def __init__(self, limits: hang.Limits) -> None:
        self._limits = limits
        self._folder: Path | None = None
        self._pages: dict[int, Page] = {}
        self._stopped: dict[int, int] = {}  # looks in a row, by process id
        self._suspicion: hang.Suspicion | None = None
        self._looked_s = 0.0

    def page(self, member: int) -> str:
        """A page for a member to come; its file, or nothing if there is none."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="pt214-elastic-"))
        self._pages[member] = Page(self._folder / f"member-{member}")
        return self._pages[member].path

    def look(self, workers: Mapping[int, procs.Worker], now_s: float) -> list[Finding]:
        """Those of the members ``workers`` that have just proven to be hung."""
        found = self._look_for_stopped(workers)
        if now_s - self._looked_s >= min(LOOK_S, self._limits.idle_s / LOOKS_PER_LIMIT):
            found += self._look_for_late(workers, now_s - self._looked_s)
            self._looked_s = now_s
        return found

    def close(self) -> None:
        """Remove the pages."""
        self._pages.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _look_for_stopped(self, workers: Mapping[int, procs.Worker]) -> list[Finding]:
        by_pid = {worker.pid: worker for worker in workers.values()}
        stopped = procs.stopped(list(by_pid))
        self._stopped = {pid: self._stopped.get(pid, 0) + 1 for pid in stopped}
        looks = self._stopped.items()
        return [Finding(by_pid[pid], {"state": "T"}) for pid, n in looks if n == STOPPED_LOOKS]

    def _look_for_late(self, workers: Mapping[int, procs.Worker], since_s: float) -> list[Finding]:
        views = {member: self._pages[member].view() for member in workers}
        known = {member: view for member, view in views.items() if view is not None}
        member = hang.late(known) if len(known) == len(views) else None
        before, self._suspicion = self._suspicion, None
        if member is None:
            return []
        cpu_s = cputime.cpu_time_s(workers[member].pid)
        suspicion = hang.weigh(before, known, member, cpu_s, since_s)
        if not hang.is_hung(suspicion, self._limits):
            self._suspicion = suspicion
            return []
        evidence = {
            "waited_s": suspicion.waited_s,
            "idle_s": suspicion.idle_s,
            "cpu_s": suspicion.cpu_s,
        }
        return [Finding(workers[member], {"state": "late", **evidence})]
