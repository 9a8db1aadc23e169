"""The launcher's workers: started, forked where that is possible, waited for, signalled.

    hire(local_rank) -> living -> reap() -> (worker, return code)

A crew knows processes and nothing of the job: no epoch, no policy.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pt214_elastic import prefork as prefork_
from pt214_elastic import procs
from pt214_elastic.options import Place

REAP_S = 0.01  # between looks at workers that have been killed


class Crew:
    """The living workers of one launcher.

    Args:
        cmd: every worker's command line.
        nproc: the world's size, told to each.
        env: variables added to this process's own.
        log_dir: folder of their output, ``None`` to share the launcher's.
        selector: told of deaths, where the system can.
        prefork: fork workers from a zygote where the system and ``cmd`` allow it.
    """

    def __init__(
        self,
        cmd: Sequence[str],
        nproc: int,
        env: Mapping[str, str],
        log_dir: Path | None,
        selector: selectors.BaseSelector,
        *,
        prefork: bool,
    ) -> None:
        self.living: dict[int, procs.Worker] = {}
        self._cmd = list(cmd)
        self._nproc = nproc
        self._env = dict(env)
        self._log_dir = log_dir
        self._selector = selector
        self._master_port = _free_port()
        self._script = prefork_.parse(self._cmd) if prefork else None
        self._zygote: prefork_.Zygote | None = None
        self._next_member = 0

    def warm_up(self, wait: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """Start the zygote and ``wait()`` until it is ready, as long as ``is_wanted()``."""
        if self._script is None:
            return
        zygote = prefork_.Zygote(self._script, {**os.environ, **self._env})
        answered: list[bool] = []
        self._selector.register(zygote, selectors.EVENT_READ, lambda _: answered.append(True))
        while not answered and is_wanted():
            wait()
        self._selector.unregister(zygote)
        if is_wanted() and zygote.take_ready():
            self._zygote = zygote
        else:
            zygote.close()

    def hire(self, local_rank: int, place_of: Callable[[int], Place]) -> procs.Worker:
        """Start one worker, as a new member whose place ``place_of(member)`` gives.

        Raises:
            OSError: the command cannot be run.
        """
        member, self._next_member = self._next_member, self._next_member + 1
        env = {
            **os.environ,
            **self._env,
            "RANK": str(local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._master_port),
            **place_of(member).to_env(),
        }
        worker = None
        if self._zygote is not None:
            worker = self._zygote.fork(member, local_rank, env, self._log_dir)
        if worker is None:
            worker = procs.start(member, local_rank, self._cmd, env, self._log_dir)
        self.living[member] = worker
        procs.watch(worker, self._selector, lambda _mask: None)
        return worker

    def reap(self) -> list[tuple[procs.Worker, int]]:
        """Those that have ended since the last call, with their return codes."""
        ended = []
        for worker in list(self.living.values()):
            code = procs.reap(worker, self._selector)
            if code is not None:
                del self.living[worker.member]
                ended.append((worker, code))
        return ended

    def signal(self, number: int) -> None:
        """Send a signal to all."""
        for worker in self.living.values():
            worker.signal(number)

    def close(self) -> None:
        """Kill who still lives, only after an error of the launcher's, and the zygote."""
        while self.living:
            self.signal(signal.SIGKILL)
            if not self.reap():
                time.sleep(REAP_S)
        if self._zygote is not None:
            self._zygote.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
