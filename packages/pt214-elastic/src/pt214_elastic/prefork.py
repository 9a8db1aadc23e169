"""The launcher's hold on the zygote: when it can serve, and asking it for workers.

Linux only (it needs a subreaper), and only for ``python script.py`` or ``python -m module``; any
other command is started the plain way.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pt214_elastic.procs import IS_LINUX, Worker

log = logging.getLogger("pt214_elastic.prefork")

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
FORK_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Script:
    """A command that a forked interpreter can run in place of a new one."""

    name: str
    is_module: bool
    args: tuple[str, ...]


def parse(cmd: Sequence[str]) -> Script | None:
    """The script of ``cmd``; ``None`` if it is not this interpreter with a plain script."""
    if not IS_LINUX or Path(cmd[0]) != Path(sys.executable):
        return None
    rest = [*cmd[1:]]
    if rest[:1] == ["-u"]:
        rest = rest[1:]
    if rest[:1] == ["-m"] and len(rest) > 1:
        return Script(rest[1], True, tuple(rest[2:]))
    if rest and not rest[0].startswith("-") and Path(rest[0]).is_file():
        return Script(rest[0], False, tuple(rest[1:]))
    return None


class Zygote:
    """The forking process; ``ready`` once it has imported everything."""

    def __init__(self, script: Script, env: Mapping[str, str]) -> None:
        self._script = script
        self._channel, theirs = socket.socketpair()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pt214_elastic.zygote", str(theirs.fileno())],
            env={**env, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._channel.settimeout(FORK_WITHIN_S)
        self._lines = self._channel.makefile("rb")

    def fileno(self) -> int:
        """Readable when the zygote is ready, or gone."""
        return self._channel.fileno()

    def take_ready(self) -> bool:
        """Read its first word; ``False`` if it died before it."""
        return self._lines.readline() == b"ready\n"

    def fork(
        self, member: int, local_rank: int, env: Mapping[str, str], log_dir: Path | None
    ) -> Worker | None:
        """A worker, or ``None`` if the zygote can't make one (any more)."""
        paths = [None, None] if log_dir is None else [
            str(log_dir / f"member-{member}.{end}") for end in ("out", "err")
        ]  # fmt: skip
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        request: dict[str, Any] = {
            "env": dict(env),
            "script": self._script.name,
            "is_module": self._script.is_module,
            "args": self._script.args,
            "out": paths[0],
            "err": paths[1],
        }
        try:
            self._channel.sendall(json.dumps(request).encode() + b"\n")
            pid = int(self._lines.readline())
        except (OSError, ValueError) as error:
            log.warning("the zygote is gone, workers start the plain way: %r", error)
            return None
        return Worker(member, local_rank, pid, os.pidfd_open(pid), lambda: _wait(pid))

    def close(self) -> None:
        """End the zygote and stop adopting orphans."""
        self._process.kill()
        self._process.wait()
        self._lines.close()
        self._channel.close()
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


def _wait(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return None if found == 0 else os.waitstatus_to_exitcode(status)
