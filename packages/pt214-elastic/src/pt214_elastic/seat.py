"""A worker's seat in the job: its rank in the current epoch, and how it comes into the next.

    join -> record -> form -> fill -> wrap anew -> (steps)
              ^--- report <--- fault, or a boundary where somebody waits to enter

``regroup`` is the only way from one epoch to the next. It may fail in the middle, when another
rank is lost: then it reports again, and the next record decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pt214_elastic import faults, transfer
from pt214_elastic.ddp import ElasticDDP
from pt214_elastic.errors import JobFailed, RankLost
from pt214_elastic.events import Kind
from pt214_elastic.link import Link
from pt214_elastic.options import OnFault
from pt214_elastic.records import Record, Verdict
from pt214_elastic.state import Tracked

CONFIRM_S = 5.0  # how long a collective's error waits for the coordinator's word
MAX_REFORMS = 20  # in a row: where no group can be formed, lost ranks are not the reason


class Seat:
    """Where this process stands among the others.

    Attributes:
        rank: -1 while it waits to enter.
        world_size: ranks of this epoch.
        committed: steps applied here.
        regroup_agreed: all ranks voted to regroup at the next boundary.
        tracked: the training state.
        wrappers: wrapped anew in each epoch.
        callbacks: called after each re-formation.
    """

    def __init__(self, link: Link, on_fault: OnFault | None, min_ranks: int | None) -> None:
        self.rank, self.world_size, self.committed = -1, 0, 0
        self.regroup_agreed = False
        self.tracked = Tracked()
        self.wrappers: list[ElasticDDP] = []
        self.callbacks: list[Callable[[], Any]] = []
        self._link = link
        self._policy = (on_fault, min_ranks)
        self._filled = False

    def confirm(self, error: BaseException) -> bool:
        """Whether the coordinator says that ``error`` came from a lost rank of this epoch."""
        if self._link.is_broken():
            return True
        return faults.may_be_lost_rank(error) and self._link.suspect(str(error), CONFIRM_S)

    def enter_job(self) -> None:
        """Take a seat, unless this process has one: the first epoch, or the next to come."""
        if self.rank >= 0:
            return
        with self._link.progress.at_boundary():
            record = self._link.join(*self._policy)
        if not self._enter(record):
            self.regroup()

    def recover(
        self, *, complete: bool = False, restore: Callable[[], None] | None = None
    ) -> Verdict | None:
        """Regroup after a fault; what becomes of the step under way."""
        epoch = self._link.epoch
        self._link.note(Kind.RELEASED, self.committed, {"after_s": self._link.since_broken_s()})
        if self._link.policy is OnFault.RAISE:
            raise RankLost(f"epoch {epoch} lost members {list(self._link.lost)}")
        return self.regroup(complete=complete, restore=restore)

    def regroup(
        self,
        *,
        complete: bool = False,
        restore: Callable[[], None] | None = None,
        hold_world: int = 0,
        hold_s: float = 0.0,
        done: bool = False,
    ) -> Verdict | None:
        """Report, take the next record and form its group, until one stands.

        Args:
            complete: this rank holds complete gradients of the step under way.
            restore: undoes that step's early changes.
            hold_world: wait for so many ranks, ``hold_s`` seconds at most.
            hold_s: see ``hold_world``.
            done: this rank has no more steps.

        Returns:
            What becomes of the step under way; ``None`` when every rank is done.

        Raises:
            JobFailed: the job cannot go on, or no group could be formed in many attempts.
        """
        for _ in range(MAX_REFORMS):
            with self._link.progress.at_boundary():
                record = self._link.report(
                    self.committed, complete, self._filled, hold_world, hold_s, done
                )
            if record is None:
                return None
            complete = complete and record.base_step == self.committed + 1
            if not complete and restore is not None:
                restore()
            if self._enter(record):
                return Verdict.FINISH if complete else Verdict.REPEAT
            hold_world = 0
        raise JobFailed(f"no group could be formed in {MAX_REFORMS} attempts: see the faults")

    def synchronise(self) -> bool:
        """Before step 0, copy rank 0's parameters to all; ``False`` if a rank was lost in it."""
        if self.committed > 0:
            return True
        try:
            with self._link.progress.at_boundary():
                for wrapper in self.wrappers:
                    wrapper.synchronise(0)
        except RuntimeError as error:
            if not self.confirm(error):
                raise
            return False
        return True

    def rebuild(self, wrapper: ElasticDDP) -> None:
        """Wrap for the current group."""
        wrapper.rebuild()
        wrapper.divisor = float(self.world_size)

    def _enter(self, record: Record) -> bool:
        """Form the group of ``record``; ``False`` if another rank is lost meanwhile."""
        rank = [member for member, _ in record.members].index(self._link.member)
        entering = self._link.member in record.fill or not self._filled
        try:
            with self._link.progress.at_boundary():
                self._link.form(record, rank)
                self._transfer(record, rank)
        except RuntimeError as error:
            if not self.confirm(error):
                raise
            return False
        self.rank, self.world_size = rank, len(record.members)
        if entering:
            self._filled, self.committed = True, record.base_step
        self.regroup_agreed = record.again
        for wrapper in self.wrappers:
            self.rebuild(wrapper)
        self._link.formed(record.epoch)
        if self._link.member in record.fill:
            self._link.note(Kind.JOIN, record.base_step, {})
        for callback in self.callbacks:
            callback()
        return True

    def _transfer(self, record: Record, rank: int) -> None:
        if record.source is None:
            return
        order = [member for member, _ in record.members]
        if record.source == self._link.member:
            transfer.send(self.tracked.gather(), [order.index(member) for member in record.fill])
        elif self._link.member in record.fill:
            self.tracked.fill(transfer.receive(order.index(record.source)))
