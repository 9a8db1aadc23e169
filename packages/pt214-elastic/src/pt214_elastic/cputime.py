"""CPU time of a worker and all it started: a compiler may run in children while the worker waits.

Linux reads ``/proc``; elsewhere ``ps`` tells. Both need nothing from the worker.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pt214_elastic.procs import IS_LINUX


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    parent: int
    session: int
    cpu_s: float


def cpu_time_s(pid: int) -> float:
    """Seconds of CPU that ``pid`` and the living of its session and descendants have used.

    Children that have ended count where their parent has waited for them.
    """
    table = _linux_table() if IS_LINUX else _ps_table()
    tree = {pid}
    grown = True
    while grown:
        more = {p.pid for p in table if p.parent in tree or p.session == pid} - tree
        tree |= more
        grown = bool(more)
    return sum(process.cpu_s for process in table if process.pid in tree)


def _linux_table() -> list[_Process]:
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    table = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            text = Path("/proc", name, "stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            continue  # it ended meanwhile
        fields = text.rpartition(")")[2].split()  # proc(5): from the third on
        ticks = sum(map(int, fields[11:15]))  # user, system, and of children waited for
        table.append(_Process(int(name), int(fields[1]), int(fields[3]), ticks * tick_s))
    return table


def _ps_table() -> list[_Process]:
    listing = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,time="], capture_output=True, text=True, check=False
    ).stdout
    table = []
    for line in listing.splitlines():
        pid, parent, time = line.split()
        table.append(_Process(int(pid), int(parent), 0, parse_ps_time_s(time)))
    return table


def parse_ps_time_s(text: str) -> float:
    """Seconds of what ``ps`` prints: ``[[days-]hours:]minutes:seconds[.hundredths]``."""
    days, _, clock = text.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86400 * int(days or 0)
