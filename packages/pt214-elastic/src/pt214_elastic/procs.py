"""Worker processes of this host: started so that no orphan can remain, watched without polling.

On Linux the kernel kills a worker when the launcher dies (``PR_SET_PDEATHSIG``), and a pidfd tells
of a worker's death at once. Elsewhere a worker ends itself when the coordinator's socket closes,
and deaths are seen by polling.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

IS_LINUX = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(eq=False)
class Worker:
    """One member's process."""

    member: int
    local_rank: int
    pid: int  # also the id of its own session and process group
    pidfd: int | None
    poll: Callable[[], int | None]  # its return code, once it has ended

    def signal(self, number: int) -> None:
        """Send a signal to the worker and all it started, if they still live."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _die_with_parent() -> Callable[[], None] | None:
    if not IS_LINUX:
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork, not after
    launcher = os.getpid()

    def in_child() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the call above
            os._exit(1)

    return in_child


def start(
    member: int,
    local_rank: int,
    cmd: Sequence[str],
    env: Mapping[str, str],
    log_dir: Path | None,
) -> Worker:
    """Start ``cmd`` in a session of its own; output goes to ``log_dir`` where one is given.

    The calling thread must outlive the worker: Linux ties the death signal to the thread.

    Raises:
        OSError: the command cannot be run.
    """
    streams: list[IO[bytes] | None] = [None, None]
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
        names = (f"member-{member}.out", f"member-{member}.err")
        streams = [open(log_dir / name, "wb") for name in names]  # noqa: SIM115
    try:
        process = subprocess.Popen(
            list(cmd),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )
    finally:
        for stream in streams:
            if stream is not None:
                stream.close()
    pidfd = os.pidfd_open(process.pid) if IS_LINUX else None
    return Worker(member, local_rank, process.pid, pidfd, process.poll)


def watch(worker: Worker, selector: selectors.BaseSelector, wake: Callable[[int], None]) -> None:
    """Have ``selector`` wake up when the worker ends, where the system can."""
    if worker.pidfd is not None:
        selector.register(worker.pidfd, selectors.EVENT_READ, wake)


def reap(worker: Worker, selector: selectors.BaseSelector) -> int | None:
    """Return code if the worker has ended (negative: minus the signal), else ``None``.

    What an ended worker had started is killed too.
    """
    code = worker.poll()
    if code is None:
        return None
    worker.signal(signal.SIGKILL)
    if worker.pidfd is not None:
        selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        worker.pidfd = None
    return code


def how(code: int) -> str:
    """How a process ended, in words: ``exit 0``, ``SIGKILL``."""
    if code >= 0:
        return f"exit {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def stopped(pids: Sequence[int]) -> frozenset[int]:
    """Those of ``pids`` that are stopped (state T): they live, but will do nothing.

    Asking the kernel needs nothing from the worker, so one whose interpreter lock is held for
    seconds by an import is never accused.
    """
    if not pids:
        return frozenset()
    if IS_LINUX:
        return frozenset(pid for pid in pids if _linux_state(pid) == "T")
    listing = subprocess.run(
        ["ps", "-o", "pid=,state=", "-p", ",".join(map(str, pids))],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    rows = [line.split() for line in listing.splitlines()]
    return frozenset(int(row[0]) for row in rows if len(row) > 1 and row[1].startswith("T"))


def _linux_state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the name before it may hold spaces and brackets
