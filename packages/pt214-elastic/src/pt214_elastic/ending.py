"""How a launcher's job comes to its end: the first reason's code, then time for the workers.

begin(code) -> SIGTERM to all -> GRACE_S -> SIGKILL to who still lives
"""

from __future__ import annotations

import signal

from pt214_elastic.crew import Crew

GRACE_S = 10.0  # from SIGTERM to SIGKILL


class Ending:
    """The end of one job; ``code`` is what the launcher returns."""

    def __init__(self, crew: Crew) -> None:
        self.code = 0
        self._crew = crew
        self._kill_at_s: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the workers have been told to end."""
        return self._kill_at_s is not None

    def note(self, code: int) -> None:
        """Something went wrong; the first code that says so stays.

        As a shell has it, death by signal N (-N in Python) is 128 + N.
        """
        self.code = self.code or (128 - code if code < 0 else code)

    def begin(self, code: int, now_s: float) -> None:
        """Tell all workers to end, once."""
        if self.has_begun:
            return
        self.note(code)
        self._kill_at_s = now_s + GRACE_S
        self._crew.signal(signal.SIGCONT)  # a stopped process would not see the next one
        self._crew.signal(signal.SIGTERM)

    def enforce(self, now_s: float) -> None:
        """Kill those whose time to end is over."""
        if self._kill_at_s is not None and now_s > self._kill_at_s:
            self._crew.signal(signal.SIGKILL)
