"""A process that has imported torch and forks workers: a replacement starts in milliseconds.

Importing torch and its optimizers takes a core 14 s here (2-core machine, torch 2.14.1), for each
rank anew; a fork of a process that has done it takes a hundredth of that.

    launcher --request--> zygote --fork--> helper --fork--> worker
                             <--pid of the worker--  helper exits: the launcher adopts the worker

The launcher is a subreaper (prctl), so it, not the zygote, is the worker's parent: it waits for
it, the kernel kills the worker with it, and the zygote's own death harms nobody. Nothing here
starts a thread or a device before the fork.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from pt214_elastic.procs import PR_SET_PDEATHSIG

MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",  # the first optimizer of a process imports it
    "pt214_elastic.session",
)
ADOPTED_WITHIN_S = 5.0


def main(channel_fd: int) -> None:
    """Serve requests until the launcher hangs up; in a worker, run its script."""
    launcher = os.getppid()
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        return
    for name in MODULES:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each worker's collector walks, and so copies, all that was imported
    channel = socket.socket(fileno=channel_fd)
    channel.sendall(b"ready\n")
    lines = channel.makefile("rb")
    for line in lines:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if os.fork() > 0:
                os._exit(0)
            if _adopted(launcher, prctl):
                channel.sendall(b"%d\n" % os.getpid())
                channel.close()
                lines.close()
                _run(request)
                return
            os._exit(1)
        os.waitpid(pid, 0)


def _adopted(launcher: int, prctl: Any) -> bool:
    """Wait until the launcher is the parent, then tie this process's life to its."""
    deadline_s = time.monotonic() + ADOPTED_WITHIN_S
    while os.getppid() != launcher:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.0005)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == launcher


def _run(request: dict[str, Any]) -> None:
    """Become ``python script args``: session, streams, environment, argv and path."""
    os.setsid()
    for fd, path in ((1, request["out"]), (2, request["err"])):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(opened, fd)
            os.close(opened)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["script"], *request["args"]]
    if request["is_module"]:
        sys.path[0] = os.getcwd()
        runpy.run_module(request["script"], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(request["script"]))
        runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]))
