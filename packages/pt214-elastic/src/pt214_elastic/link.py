"""What a session needs of the world around it: a job's coordinator and group, or just a group.

``Link`` is the plain case: one process, or ranks started by torchrun, where nothing can be healed.
``JobLink`` speaks with the launcher's coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from pt214_elastic import options
from pt214_elastic.client import Client
from pt214_elastic.errors import JobFailed
from pt214_elastic.events import Kind
from pt214_elastic.options import OnFault, Place
from pt214_elastic.progress import Progress
from pt214_elastic.records import Record, Verdict
from pt214_elastic.reform import Group, init_process_group, posted
from pt214_elastic.release import Sockets
from pt214_elastic.store import CoordinatorStore


class Link:
    """No launcher of ours: a group of fixed ranks, in which no fault is handled."""

    can_heal = False
    job_epoch = 0
    regroup_wanted = False
    lost: tuple[int, ...] = ()

    def __init__(self, backend: str, timeout: timedelta) -> None:
        if not dist.is_initialized():
            if options.started_by_torchrun():
                init_process_group(backend, timeout=timeout)
            else:
                store = HashStore()
                init_process_group(backend, timeout=timeout, store=store, rank=0, world_size=1)
        self.on_broken: Callable[[], None] = lambda: None
        self.progress = Progress("", posted)
        self.member = dist.get_rank()
        self.epoch = 1
        self.left = False

    @property
    def policy(self) -> OnFault:
        """What to do about a fault."""
        return OnFault.parse(options.get_option("on_fault") or "rejoin")

    def is_broken(self) -> bool:
        """Whether the current epoch is broken."""
        return False

    def since_broken_s(self) -> float:
        """Seconds since that was heard."""
        return 0.0

    def suspect(self, text: str, timeout_s: float) -> bool:
        """Ask whether an error came from a lost rank."""
        return False

    def join(self, on_fault: OnFault | None, min_ranks: int | None) -> Record:
        """The first record."""
        if on_fault is not None and options.get_option("on_fault") is None:
            options.set_option("on_fault", str(on_fault))
        members = tuple((rank, "") for rank in range(dist.get_world_size()))
        return Record(1, members, 0, Verdict.REPEAT, (), None, False)

    def report(
        self,
        committed: int,
        complete: bool,
        filled: bool,
        hold_world: int = 0,
        hold_s: float = 0.0,
        done: bool = False,
    ) -> Record | None:
        """The next record; ``None`` when all are done."""
        return None

    def finish_early(self, committed: int, timeout_s: float) -> bool:
        """Tell of a ``break``; whether all others broke off too."""
        return True

    def form(self, record: Record, rank: int) -> None:
        """Become the group of ``record``."""

    def formed(self, epoch: int) -> None:
        """Tell that this member stands in ``epoch``."""

    def committed(self, step: int) -> None:
        """Tell that ``step`` is applied here."""

    def note(self, kind: Kind, step: int | None, data: Mapping[str, Any]) -> None:
        """Send an event."""

    def leave(self, error: str) -> None:
        """Tell that this member goes; an empty ``error`` means that nothing is wrong."""
        self.left = True


class JobLink(Link):
    """A member of a launcher's job."""

    can_heal = True

    def __init__(
        self, place: Place, backend: str, timeout: timedelta, in_place: bool | None = None
    ) -> None:
        self._sockets = Sockets()
        self.on_broken = lambda: None
        self._client = Client(place, self._sockets.cut, lambda: self.on_broken())
        self._store = CoordinatorStore(self._client)
        self._group = Group(self._store, place.member, backend, timeout, in_place)
        self.progress = Progress(place.progress_path, posted)
        self.progress.start_pulse()
        self.member = place.member
        self.job_epoch = self._client.job_epoch
        self.left = False
        options.on_option(lambda name, value: self._client.send("policy", on_fault=value))

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """Epoch of the last record taken."""
        return self._client.epoch

    @property
    def regroup_wanted(self) -> bool:  # type: ignore[override]
        """Whether somebody waits to enter."""
        return self._client.regroup_wanted

    @property
    def lost(self) -> tuple[int, ...]:  # type: ignore[override]
        """Members named in the last fault."""
        return self._client.lost

    @property
    def policy(self) -> OnFault:  # noqa: D102
        return OnFault.parse(options.get_option("on_fault") or self._client.policy or "rejoin")

    def is_broken(self) -> bool:  # noqa: D102
        return self._client.is_broken(self.epoch)

    def since_broken_s(self) -> float:  # noqa: D102
        return time.monotonic() - self._client.broken_s

    def suspect(self, text: str, timeout_s: float) -> bool:  # noqa: D102
        self._client.send("suspect", epoch=self.epoch, text=text[:500])
        return self._client.wait_broken(self.epoch, timeout_s)

    def join(self, on_fault: OnFault | None, min_ranks: int | None) -> Record:  # noqa: D102
        chosen = options.get_option("on_fault") or (None if on_fault is None else str(on_fault))
        if chosen is not None:
            options.set_option("on_fault", chosen)
        self._client.send("join", handle=self._group.handle(), on_fault=chosen, min_ranks=min_ranks)
        return self._must(self._client.wait_record())

    def report(  # noqa: D102
        self,
        committed: int,
        complete: bool,
        filled: bool,
        hold_world: int = 0,
        hold_s: float = 0.0,
        done: bool = False,
    ) -> Record | None:
        if self.lost:
            self._group.excuse()
        self._client.send(
            "report",
            epoch=self.epoch,
            handle=self._group.handle(),
            committed=committed,
            complete=complete,
            filled=filled,
            hold_world=hold_world,
            hold_s=hold_s,
            done=done,
        )
        return self._client.wait_record()

    def finish_early(self, committed: int, timeout_s: float) -> bool:  # noqa: D102
        self._client.send(
            "report", epoch=self.epoch, handle="", committed=committed, complete=False,
            filled=True, hold_world=0, hold_s=0.0, done=True,
        )  # fmt: skip
        return self._client.wait_finished(timeout_s)

    def form(self, record: Record, rank: int) -> None:  # noqa: D102
        with self._sockets.forming(record.epoch):
            if self.is_broken():
                raise RuntimeError(f"gloo: epoch {record.epoch} is broken already")
            self._group.form(record, rank)
        if self.is_broken():  # the cut came before the last sockets were there
            self._sockets.cut(record.epoch)

    def formed(self, epoch: int) -> None:  # noqa: D102
        self._client.send("formed", epoch=epoch)

    def committed(self, step: int) -> None:  # noqa: D102
        self._client.send("committed", step=step, epoch=self.epoch)

    def note(self, kind: Kind, step: int | None, data: Mapping[str, Any]) -> None:  # noqa: D102
        self._client.send("note", kind=str(kind), step=step, epoch=self.epoch, data=dict(data))

    def leave(self, error: str) -> None:  # noqa: D102
        self.left = True
        self._client.send("leave", error=error)

    @staticmethod
    def _must(record: Record | None) -> Record:
        if record is None:
            raise JobFailed("the job was done before this member entered")
        return record
