"""The launcher: starts the ranks of this host, hosts the coordinator, replaces what is lost.

    spawn nproc workers -> poll (deaths, messages, signals) -> all ended -> return code
                              |  a death: tell the coordinator, then spawn a replacement
                              |  Ctrl-C, SIGTERM, stop(): SIGTERM to all, SIGKILL after a grace

It runs in one thread and never imports torch. A worker's death is proven here, by ``wait``.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pt214_elastic import hang, membership, procs, records, signals
from pt214_elastic.coordinator import Coordinator
from pt214_elastic.crew import Crew
from pt214_elastic.ending import Ending
from pt214_elastic.errors import OptionError
from pt214_elastic.events import Event, Kind
from pt214_elastic.journal import Journal
from pt214_elastic.options import OnFault, Place
from pt214_elastic.replacements import Replacements
from pt214_elastic.sentry import Sentry

log = logging.getLogger("pt214_elastic.launch")

POLL_S = 0.1  # how often process states are looked at; deaths and messages wake at once
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
        hang_timeout_s: how long all other ranks may wait for one that is inside a step and uses no
            CPU; then it is lost. ``math.inf`` for ever. Between steps a rank takes its time.
        hang_busy_timeout_s: the same for one that uses CPU, as a long compile does.
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
        hang_timeout_s: float = 600.0,
        hang_busy_timeout_s: float = 3600.0,
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
        if not 0 < hang_timeout_s <= hang_busy_timeout_s:
            raise OptionError(
                f"hang_timeout_s={hang_timeout_s:g}, hang_busy_timeout_s={hang_busy_timeout_s:g}:"
                " expected more than 0 for the first, and no less for the second"
            )
        self._nproc = nproc
        self._journal = Journal(on_event, events_path)
        self._replacements = Replacements(OnFault.parse(on_fault), max_restarts)
        self._sentry = Sentry(hang.Limits(hang_timeout_s, hang_busy_timeout_s))
        self._stop_signal: int | None = None
        self._dismissed: set[int] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._key = secrets.token_bytes(KEY_BYTES)
        state = membership.State(nproc, min_ranks, patience_s, now_s=time.monotonic())
        self._coordinator = Coordinator(self._key, state, self._note)
        self._coordinator.on_policy = self._take_policy
        self._coordinator.policy = str(self._replacements.policy)
        selector = self._coordinator.selector
        selector.register(self._wake_read, selectors.EVENT_READ, self._drain_wake)
        self._crew = Crew(cmd, nproc, env or {}, log_dir, selector, prefork=prefork)
        self._ending = Ending(self._crew)

    # -- for the caller ---------------------------------------------------------------------

    def run(self) -> int:
        """Run the job to its end; 0 when all members ended well.

        Raises:
            Exception: whatever ``on_event`` raised, once every worker is gone.
        """
        with ExitStack() as stack:
            stack.enter_context(self._journal.opened())
            stack.callback(self._close)
            stack.enter_context(signals.handled(self.stop))
            self._crew.warm_up(
                lambda: self._coordinator.poll(POLL_S), lambda: self._stop_signal is None
            )
            if self._stop_signal is not None:
                self._ending.note(128 + self._stop_signal)
                return self._finish()
            for local_rank in range(self._nproc + (self._replacements.policy is OnFault.SPARE)):
                self._spawn(local_rank)
            while self._crew.living or self._replacements.queued:
                self._turn()
            return self._finish()

    @property
    def stopping(self) -> bool:
        """Whether a signal or ``stop`` asked for the end: ranks that go now are no faults."""
        return self._stop_signal is not None

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the job: SIGTERM to every worker, SIGKILL after a grace; from any thread."""
        self._stop_signal = number
        self._wake_write.send(b"x")

    def workers(self) -> dict[int, int]:
        """Process ids of the living workers, by member id; from any thread."""
        return {member: worker.pid for member, worker in dict(self._crew.living).items()}

    # -- the loop ---------------------------------------------------------------------------

    def _turn(self) -> None:
        self._coordinator.poll(POLL_S)
        self._look_for_hung()
        for worker, code in self._crew.reap():
            self._ended(worker, code)
        self._replace()
        self._coordinator.tell(records.Supply(self._can_grow()))
        self._enforce_end()

    def _look_for_hung(self) -> None:
        members = self._coordinator.state.members
        workers = {m: self._crew.living[m] for m in members if m in self._crew.living}
        for found in self._sentry.look(workers, time.monotonic()):
            self._note(Kind.CUSTOM, found.worker.member, name="hang", **found.evidence)
            self._coordinator.tell(records.Lost(found.worker.member))
            found.worker.signal(signal.SIGKILL)

    def _ended(self, worker: procs.Worker, code: int) -> None:
        coordinator = self._coordinator
        was_member = worker.member in coordinator.state.members
        is_ours = self._is_ours
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
            self._ending.note(code)
        elif is_ours:
            self._replacements.want(worker.local_rank, procs.how(code), time.monotonic())
        else:
            self._replacements.put_off(worker.local_rank, code, time.monotonic())

    def _replace(self) -> None:
        now_s = time.monotonic()
        code = self._replacements.settle(
            now_s, is_ours=self._is_ours, anybody_lives=bool(self._crew.living)
        )
        if code is not None:
            self._coordinator.tell(records.Supply(False))
            self._ending.begin(code, now_s)
        survivors_wait = self._coordinator.state.phase is membership.Phase.FAULTED
        for local_rank in self._replacements.due(now_s, survivors_wait=survivors_wait):
            if not self._ending.has_begun:
                self._spawn(local_rank)

    @property
    def _is_ours(self) -> bool:
        """Whether any worker speaks our protocol, as far as has been seen."""
        return self._coordinator.state.epoch > 0 or bool(self._coordinator.known)

    @property
    def _is_ending(self) -> bool:
        return self._stop_signal is not None or self._ending.has_begun

    def _can_grow(self) -> bool:
        state = self._coordinator.state
        inside = {*state.members, *state.joiners}
        return any(m not in inside for m in self._crew.living) or self._replacements.expected

    def _enforce_end(self) -> None:
        coordinator, ending, now_s = self._coordinator, self._ending, time.monotonic()
        if coordinator.end is not None and not coordinator.end.ok and not ending.has_begun:
            log.error("job failed: %s", self._reason())
            ending.begin(1, now_s)
        if self._stop_signal is not None and not ending.has_begun:
            ending.code = 128 + self._stop_signal
            ending.begin(ending.code, now_s)
        if self._journal.failure is not None:
            ending.begin(1, now_s)
        if coordinator.finished and not ending.has_begun:
            self._dismiss_outsiders()
        ending.enforce(now_s)

    def _dismiss_outsiders(self) -> None:
        """Spares and late replacements have nothing to enter any more."""
        for worker in self._crew.living.values():
            if worker.member not in self._coordinator.state.members:
                self._dismissed.add(worker.member)
                worker.signal(signal.SIGKILL)

    def _finish(self) -> int:
        rejected = dict(self._coordinator.rejected)
        self._note(Kind.END, code=self._ending.code, reason=self._reason(), rejected=rejected)
        if self._journal.failure is not None:
            raise self._journal.failure
        return self._ending.code

    def _reason(self) -> str:
        if (failure := self._journal.failure) is not None:
            return f"on_event raised {type(failure).__name__}: {failure}"
        end, error = self._coordinator.end, self._coordinator.last_error
        if end is None or end.ok:
            return end.reason if end is not None else ""
        return f"{end.reason}; the last error was {error}" if error else end.reason

    # -- pieces -----------------------------------------------------------------------------

    def _spawn(self, local_rank: int) -> None:
        host, port = self._coordinator.address
        worker = self._crew.hire(
            local_rank,
            lambda member: Place(host, port, self._key, member, self._sentry.page(member)),
        )
        self._note(Kind.SPAWN, worker.member, pid=worker.pid, local_rank=local_rank)

    def _take_policy(self, policy: str | None, min_ranks: int | None) -> None:
        if policy is not None:
            self._replacements.policy = OnFault.parse(policy)
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

    def _close(self) -> None:
        self._crew.close()
        self._sentry.close()
        self._coordinator.selector.unregister(self._wake_read)
        self._coordinator.close()
        self._wake_read.close()
        self._wake_write.close()
