"""CPU time of a process and of what it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from pt214_elastic.cputime import cpu_time_s, parse_ps_time_s

BURN = "import time\nwhile True: pass"
SLEEP = "import time; time.sleep(600)"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"


def grows(pid: int, by_s: float, limit_s: float) -> bool:
    start_s, deadline_s = cpu_time_s(pid), time.monotonic() + limit_s
    while cpu_time_s(pid) < start_s + by_s:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("code", "busy"), [(BURN, True), (PARENT, True), (SLEEP, False)], ids=["own", "child's", "none"]
)
def test_cpu_time_of_a_tree_grows_if_any_of_it_computes(code: str, busy: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        started = grows(process.pid, 0.0, 5.0)
        assert started
        assert grows(process.pid, 0.3, 20.0 if busy else 0.7) is busy
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_is_gone_has_none() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    assert cpu_time_s(process.pid) == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0:01.50", 1.5), ("12:03.00", 723.0), ("01:02:03", 3723.0), ("2-01:00:00", 176400.0)],
)
def test_what_ps_prints_is_understood(text: str, seconds: float) -> None:
    assert parse_ps_time_s(text) == seconds
