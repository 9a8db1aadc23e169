"""The launcher: starts the ranks of this host, hosts the coordinator, replaces what is lost.

    spawn nproc workers -> poll (deaths, messages, signals) -> all ended -> return code
                              |  a death: tell the coordinator, then spawn a replacement
                              |  Ctrl-C, SIGTERM, stop(): SIGTERM to all, SIGKILL after a grace

It runs in one thread and never imports torch. A worker's death is proven here, by ``wait``.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pt214_elastic import membership, procs, records
from pt214_elastic import prefork as prefork_
from pt214_elastic.coordinator import Coordinator
from pt214_elastic.errors import OptionError
from pt214_elastic.events import Event, Kind
from pt214_elastic.journal import Journal
from pt214_elastic.options import OnFault, Place

log = logging.getLogger("pt214_elastic.launch")

POLL_S = 0.1  # how often process states are looked at; deaths and messages wake at once
GRACE_S = 10.0  # from SIGTERM to SIGKILL
STOPPED_LOOKS = 2  # a debugger stops a process for one look; a hang is seen in two
STRANGER_GRACE_S = 30.0  # a death before any worker reported: is it a job of ours at all?
SPAWN_WITHIN_S = 0.5  # survivors may be in a long computation: don't wait for them longer
KEY_BYTES = 32


class Launcher:
    """Run ``cmd`` on ``nproc`` ranks of this host and keep the job going through faults.

    Args:
        cmd: the worker's command line.
        nproc: ranks wanted, at least 1.
        min_ranks: fewer than these train no step; a worker's ``init(min_ranks=)`` overrides it.
        on_fault: ``"rejoin"`` replaces a lost rank, ``"spare"`` keeps one more process waiting,
            ``"shrink"`` goes on with fewer, ``"raise"`` lets the survivors raise.
        max_restarts: replacements in all, for the whole job.
        env: variables added to this process's own for the workers.
        log_dir: folder for ``member-N.out`` and ``member-N.err``; without it, output is shared.
        on_event: called with each :class:`Event`, in order, in the thread of :meth:`run`; what it
            raises ends the job and comes out of :meth:`run`.
        events_path: file that gets the same events as JSON lines.
        patience_s: how long too few ranks wait for replacements.
        prefork: fork workers from a process that has imported torch, where the system and
            ``cmd`` allow it.

    Raises:
        OptionError: an argument is out of range; the message names it.

    >>> import sys
    >>> Launcher([sys.executable, "-c", "pass"], nproc=2).run()
    0
    """

    def __init__(
        self,
        cmd: Sequence[str],
        *,
        nproc: int,
        min_ranks: int = 1,
        on_fault: str = "rejoin",
        max_restarts: int = 3,
        env: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
        on_event: Callable[[Event], None] | None = None,
        events_path: Path | None = None,
        patience_s: float = 120.0,
        prefork: bool = True,
    ) -> None:
        if not cmd:
            raise OptionError("cmd is empty: expected the worker's command line")
        if nproc < 1:
            raise OptionError(f"nproc={nproc}: expected at least 1")
        if not 1 <= min_ranks <= nproc:
            raise OptionError(f"min_ranks={min_ranks}: expected 1 to nproc={nproc}")
        if max_restarts < 0:
            raise OptionError(f"max_restarts={max_restarts}: expected 0 or more")
        self._cmd = list(cmd)
        self._nproc = nproc
        self._policy = OnFault.parse(on_fault)
        self._restarts_left = max_restarts
        self._env = dict(env or {})
        self._log_dir = log_dir
        self._journal = Journal(on_event, events_path)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._workers: dict[int, procs.Worker] = {}
        self._next_member = 0
        self._stop_signal: int | None = None
        self._kill_at_s: float | None = None
        self._early: list[tuple[procs.Worker, int]] = []
        self._early_since_s = 0.0
        self._code = 0
        self._to_spawn: list[int] = []
        self._dismissed: set[int] = set()
        self._spawn_at_s = 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._master_port = _free_port()
        self._script = prefork_.parse(self._cmd) if prefork else None
        self._zygote: prefork_.Zygote | None = None
        state = membership.State(nproc, min_ranks, patience_s, now_s=time.monotonic())
        self._coordinator = Coordinator(self._key, state, self._note)
        self._coordinator.on_policy = self._take_policy
        self._coordinator.policy = str(self._policy)
        self._coordinator.selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)

    # -- for the caller ---------------------------------------------------------------------

    def run(self) -> int:
        """Run the job to its end; 0 when all members ended well.

        Raises:
            Exception: whatever ``on_event`` raised, once every worker is gone.
        """
        with ExitStack() as stack:
            stack.enter_context(self._journal.opened())
            stack.callback(self._close)
            stack.enter_context(self._signals())
            self._start_zygote()
            if self._stop_signal is not None:
                self._code = 128 + self._stop_signal
                return self._finish()
            for local_rank in range(self._nproc + (self._policy is OnFault.SPARE)):
                self._spawn(local_rank)
            while self._workers or self._to_spawn:
                self._turn()
            return self._finish()

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the job: SIGTERM to every worker, SIGKILL after a grace; from any thread."""
        self._stop_signal = number
        self._wake_write.send(b"x")

    def workers(self) -> dict[int, int]:
        """Process ids of the living workers, by member id; from any thread."""
        return {member: worker.pid for member, worker in dict(self._workers).items()}

    # -- the loop ---------------------------------------------------------------------------

    def _turn(self) -> None:
        self._coordinator.poll(POLL_S)
        self._look_for_stopped()
        for worker in list(self._workers.values()):
            code = procs.reap(worker, self._coordinator.selector)
            if code is not None:
                self._ended(worker, code)
        self._settle_early()
        self._spawn_replacements()
        self._coordinator.tell(records.Supply(self._can_grow()))
        self._enforce_end()

    def _look_for_stopped(self) -> None:
        members = self._coordinator.state.members
        living = [w for w in self._workers.values() if w.member in members]
        stopped = procs.stopped([worker.pid for worker in living])
        for worker in living:
            worker.stopped_looks = worker.stopped_looks + 1 if worker.pid in stopped else 0
            if worker.stopped_looks == STOPPED_LOOKS:
                # Killed, so that it can't wake later as a member of a world that moved on.
                self._note(Kind.CUSTOM, worker.member, name="hang", state="T")
                self._coordinator.tell(records.Lost(worker.member))
                worker.signal(signal.SIGKILL)

    def _ended(self, worker: procs.Worker, code: int) -> None:
        del self._workers[worker.member]
        coordinator = self._coordinator
        was_member = worker.member in coordinator.state.members
        connected = coordinator.state.epoch > 0 or bool(coordinator.known)
        self._note(Kind.EXIT, worker.member, how=procs.how(code), code=code, pid=worker.pid)
        finished = coordinator.finished
        lost = code != 0 or (was_member and not finished)
        event = records.Lost(worker.member) if lost and code else records.Left(worker.member)
        coordinator.tell(event)
        if worker.member in self._dismissed:
            return
        if code == 0 or coordinator.end is not None or self._is_ending:
            return
        if finished:
            self._code = self._code or _exit_code(code)
        elif not connected:
            self._early.append((worker, code))
            self._early_since_s = time.monotonic()
        else:
            self._replace(worker, code)

    def _replace(self, worker: procs.Worker, code: int) -> None:
        if self._policy not in (OnFault.REJOIN, OnFault.SPARE):
            return
        if self._restarts_left == 0:
            log.warning("member %d (%s) is not replaced: no restart is left", worker.member,
                        procs.how(code))  # fmt: skip
            return
        self._restarts_left -= 1
        self._to_spawn.append(worker.local_rank)
        self._spawn_at_s = time.monotonic() + SPAWN_WITHIN_S

    def _spawn_replacements(self) -> None:
        """After the survivors have their new epoch: a fork takes longer than forming that."""
        state = self._coordinator.state
        waiting = state.phase is membership.Phase.FAULTED and time.monotonic() < self._spawn_at_s
        if self._to_spawn and not waiting:
            ranks, self._to_spawn = self._to_spawn, []
            if self._kill_at_s is None:
                for local_rank in ranks:
                    self._spawn(local_rank)

    def _settle_early(self) -> None:
        """Deaths before any worker reported: replace in a job of ours, end any other."""
        if not self._early:
            return
        if self._coordinator.known or self._coordinator.state.epoch > 0:
            for worker, code in self._early:
                self._replace(worker, code)
            self._early.clear()
        elif not self._workers or time.monotonic() - self._early_since_s > STRANGER_GRACE_S:
            self._code = _exit_code(self._early[0][1])
            self._early.clear()
            self._coordinator.tell(records.Supply(False))
            self._begin_end()

    @property
    def _is_ending(self) -> bool:
        return self._stop_signal is not None or self._kill_at_s is not None

    def _can_grow(self) -> bool:
        members = self._coordinator.state.members
        joiners = self._coordinator.state.joiners
        outside = any(m not in members and m not in joiners for m in self._workers)
        return outside or bool(self._early) or bool(self._to_spawn)

    def _enforce_end(self) -> None:
        coordinator = self._coordinator
        if coordinator.end is not None and not coordinator.end.ok and self._kill_at_s is None:
            log.error("job failed: %s", self._reason())
            self._code = self._code or 1
            self._begin_end()
        if self._stop_signal is not None and self._kill_at_s is None:
            self._code = 128 + self._stop_signal
            self._begin_end()
        if self._journal.failure is not None and self._kill_at_s is None:
            self._code = self._code or 1
            self._begin_end()
        if coordinator.finished and self._kill_at_s is None:
            self._dismiss_outsiders()
        if self._kill_at_s is not None and time.monotonic() > self._kill_at_s:
            for worker in self._workers.values():
                worker.signal(signal.SIGKILL)

    def _dismiss_outsiders(self) -> None:
        """Spares and late replacements have nothing to enter any more."""
        for worker in self._workers.values():
            if worker.member not in self._coordinator.state.members:
                self._dismissed.add(worker.member)
                worker.signal(signal.SIGKILL)

    def _begin_end(self) -> None:
        self._kill_at_s = time.monotonic() + GRACE_S
        for worker in self._workers.values():
            worker.signal(signal.SIGCONT)  # a stopped process would not see the next one
            worker.signal(signal.SIGTERM)

    def _finish(self) -> int:
        rejected = dict(self._coordinator.rejected)
        self._note(Kind.END, code=self._code, reason=self._reason(), rejected=rejected)
        if self._journal.failure is not None:
            raise self._journal.failure
        return self._code

    def _reason(self) -> str:
        if (failure := self._journal.failure) is not None:
            return f"on_event raised {type(failure).__name__}: {failure}"
        end, error = self._coordinator.end, self._coordinator.last_error
        if end is None or end.ok:
            return end.reason if end is not None else ""
        return f"{end.reason}; the last error was {error}" if error else end.reason

    # -- pieces -----------------------------------------------------------------------------

    def _spawn(self, local_rank: int) -> None:
        member, self._next_member = self._next_member, self._next_member + 1
        host, port = self._coordinator.address
        env = {
            **os.environ,
            **self._env,
            "RANK": str(local_rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self._nproc),
            "LOCAL_WORLD_SIZE": str(self._nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._master_port),
            **Place(host, port, self._key, member).to_env(),
        }
        worker = None
        if self._zygote is not None:
            worker = self._zygote.fork(member, local_rank, env, self._log_dir)
        if worker is None:
            worker = procs.start(member, local_rank, self._cmd, env, self._log_dir)
        self._workers[member] = worker
        procs.watch(worker, self._coordinator.selector, lambda _mask: None)
        self._note(Kind.SPAWN, member, pid=worker.pid, local_rank=local_rank)

    def _start_zygote(self) -> None:
        """Start it and wait until it is ready, as long as nobody asks to stop."""
        if self._script is None:
            return
        selector, zygote = self._coordinator.selector, None
        zygote = prefork_.Zygote(self._script, {**os.environ, **self._env})
        answered: list[bool] = []
        selector.register(zygote, selectors.EVENT_READ, lambda _: answered.append(True))
        while not answered and self._stop_signal is None:
            self._coordinator.poll(POLL_S)
        selector.unregister(zygote)
        if self._stop_signal is None and zygote.take_ready():
            self._zygote = zygote
        else:
            zygote.close()

    def _take_policy(self, policy: str | None, min_ranks: int | None) -> None:
        if policy is not None:
            self._policy = OnFault.parse(policy)
            self._coordinator.policy = policy
        if min_ranks is not None:
            state = self._coordinator.state
            ranks = max(1, min(min_ranks, self._nproc))
            if ranks != state.min_ranks:
                self._coordinator.set_min_ranks(ranks)

    def _note(
        self,
        kind: Kind,
        member: int | None = None,
        step: int | None = None,
        epoch: int | None = None,
        **data: Any,
    ) -> None:
        state = self._coordinator.state
        members = state.members
        rank = members.index(member) if member is not None and member in members else None
        at = state.epoch if epoch is None else epoch
        self._journal.note(Event(kind, member, rank, at, step, data))

    def _drain_wake(self, _mask: int) -> None:
        self._wake_read.recv(4096)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a stop; only the main thread can set handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handler(number: int, _frame: FrameType | None) -> None:
            self.stop(number)

        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, handler) for number in numbers]
        try:
            yield
        finally:
            for number, old in zip(numbers, before, strict=True):
                signal.signal(number, old)

    def _close(self) -> None:
        for worker in list(self._workers.values()):  # only after an error in run itself
            worker.signal(signal.SIGKILL)
            while procs.reap(worker, self._coordinator.selector) is None:
                time.sleep(POLL_S / 10)
        if self._zygote is not None:
            self._zygote.close()
        self._coordinator.selector.unregister(self._wake_read)
        self._coordinator.close()
        self._wake_read.close()
        self._wake_write.close()


def _exit_code(code: int) -> int:
    """A shell's view of a return code: death by signal N is 128 + N."""
    return 128 - code if code < 0 else code


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
