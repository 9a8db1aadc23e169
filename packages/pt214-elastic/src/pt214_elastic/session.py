"""A worker's side of an elastic job: its epoch, its state, its loop.

    init -> (joiners wait at the first track or steps) -> epoch -> steps -> done
                                  fault or boundary: report -> record -> form -> fill -> wrap anew

``regroup`` is the only way from one epoch to the next. It may fail in the middle, when another
rank is lost: then it reports again, and the next record decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pt214_elastic import faults, transfer
from pt214_elastic.ddp import ElasticDDP
from pt214_elastic.errors import JobFailed, LoopError, RankLost
from pt214_elastic.events import Kind
from pt214_elastic.link import Link
from pt214_elastic.loader import Loader
from pt214_elastic.loop import Step
from pt214_elastic.options import OnFault
from pt214_elastic.pending import Pending
from pt214_elastic.records import Record, Verdict
from pt214_elastic.state import Tracked

log = logging.getLogger("pt214_elastic")

CONFIRM_S = 5.0  # how long a collective's error waits for the coordinator's word
MAX_REPEATS = 20  # of one step: a link that breaks each time is no lost rank
MAX_REFORMS = 20  # in a row: where no group can be formed, lost ranks are not the reason
BREAK_S = 2.0  # after ``break``: how long the others have to break too


class Elastic:
    """What :func:`pt214_elastic.init` returns; one per process.

    Attributes:
        rank: this process's rank, -1 while it waits to enter.
        world_size: ranks of this epoch.
        member_id: never changes and is never reused in a job; ranks are.
        epoch: counts the re-formations, from 1.
        process_group: the default group; the same object in all epochs where torch allows.
    """

    def __init__(self, link: Link, on_fault: OnFault | None, min_ranks: int | None) -> None:
        self.rank, self.world_size = -1, 0
        self.tracked = Tracked()
        self.wrappers: list[ElasticDDP] = []
        self.current: Step | None = None
        self.regroup_agreed = False
        self._link = link
        self.pending = Pending(lambda: self.is_broken)
        link.on_broken = self.pending.abandon
        self._policy = (on_fault, min_ranks)
        self._callbacks: list[Callable[[], Any]] = []
        self._committed = 0
        self._filled = False
        self._repeats = (-1, 0)
        register_optimizer_step_pre_hook(self._before_optimizer)
        if link.job_epoch == 0:
            self._enter_job()

    @property
    def member_id(self) -> int:
        """This process's id in the job."""
        return self._link.member

    @property
    def epoch(self) -> int:
        """Number of the current epoch; 0 while waiting to enter."""
        return self._link.epoch if self.rank >= 0 else 0

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def is_broken(self) -> bool:
        """Whether the current epoch has lost a rank and is not yet re-formed."""
        return self._link.is_broken()

    @property
    def regroup_wanted(self) -> bool:
        """Whether somebody waits to enter, as far as this rank knows."""
        return self._link.regroup_wanted

    # -- for the user -----------------------------------------------------------------------

    def wrap_ddp(self, module: nn.Module, **ddp_kwargs: Any) -> ElasticDDP:
        """A stable stand-in for ``DistributedDataParallel(module, **ddp_kwargs)``.

        Parameters are copied from rank 0 before the first step.
        """
        wrapper = ElasticDDP(module, self.pending, **ddp_kwargs)
        self.wrappers.append(wrapper)
        if self.rank >= 0:
            self._rebuild(wrapper)
        return wrapper

    def track(self, **objects: Any) -> None:
        """Make these objects part of the training state.

        They are rolled back when a step repeats and sent to joiners; in a joiner, they are filled
        before this returns, if the job has state already.

        Raises:
            StateError: an object has no ``state_dict``, or the peer sent none for it.
        """
        self.tracked.add(objects)
        self._enter_job()

    def loader(self, dataset: Any, global_batch: int, **options: Any) -> Loader:
        """Deal a map-style dataset over the ranks; see :class:`Loader` for the options."""
        return Loader(dataset, global_batch, **options)

    def on_epoch(self, callback: Callable[[], Any]) -> None:
        """Have ``callback()`` called after each re-formation; it may read rank and world size."""
        self._callbacks.append(callback)

    def emit(self, name: str, *, step: int | None = None, **data: Any) -> None:
        """Send a small event to the launcher; ``data`` must be JSON."""
        self._link.note(Kind.CUSTOM, step, {"name": name, **data})

    def wait_for_world(self, n: int, timeout_s: float) -> int:
        """At a step boundary, on all ranks: wait until the world has ``n`` ranks.

        Returns:
            The world size then; less than ``n`` when ``timeout_s`` seconds were not enough.

        Raises:
            LoopError: called inside a step.
        """
        if self.current is not None:
            raise LoopError("wait_for_world is called inside a step: call it between steps")
        self._enter_job()
        deadline_s = time.monotonic() + timeout_s
        while self.world_size < n and self._link.can_heal:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            self.regroup(hold_world=n, hold_s=left_s)
        return self.world_size

    def steps(self, n: int) -> Iterator[Step]:
        """Hand out the steps up to number ``n - 1``, each until it is committed.

        Raises:
            JobFailed: the job cannot go on.
            RankLost: a rank was lost and ``on_fault`` is ``"raise"``.
        """
        self._enter_job()
        step: Step | None = None
        try:
            while True:
                if self.is_broken or self.regroup_agreed:
                    self.recover() if self.is_broken else self.regroup()
                elif self._committed >= n:
                    if self.regroup(done=True) is None:
                        return
                elif self._synchronised():
                    step = Step(self, self._committed)
                    yield step
        except GeneratorExit:
            if step is not None and not self._link.left:
                self._break_off()
            raise

    # -- for the step -----------------------------------------------------------------------

    def confirm(self, error: BaseException) -> bool:
        """Whether the coordinator says that ``error`` came from a lost rank of this epoch."""
        if self.is_broken:
            return True
        return faults.may_be_lost_rank(error) and self._link.suspect(str(error), CONFIRM_S)

    def recover(
        self, *, complete: bool = False, restore: Callable[[], None] | None = None
    ) -> Verdict | None:
        """Regroup after a fault; what becomes of the step under way."""
        epoch = self._link.epoch
        self._link.note(Kind.RELEASED, self._committed, {"after_s": self._link.since_broken_s()})
        if self._link.policy is OnFault.RAISE:
            raise RankLost(f"epoch {epoch} lost members {list(self._link.lost)}")
        return self.regroup(complete=complete, restore=restore)

    def note_committed(self, number: int) -> None:
        """The step is applied here."""
        self._committed = number + 1
        self._link.committed(number)

    def note_repeat(self, number: int) -> None:
        """The step is undone here.

        Raises:
            JobFailed: it was undone too often.
        """
        step, times = self._repeats
        self._repeats = (number, times + 1 if step == number else 1)
        self._link.note(Kind.REPEAT, number, {})
        if self._repeats[1] > MAX_REPEATS:
            raise JobFailed(f"step {number} was repeated {MAX_REPEATS} times: see the faults")

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank is going, and why."""
        self._link.leave(f"{type(error).__name__}: {error}")

    # -- from epoch to epoch ----------------------------------------------------------------

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
            record = self._link.report(
                self._committed, complete, self._filled, hold_world, hold_s, done
            )
            if record is None:
                return None
            complete = complete and record.base_step == self._committed + 1
            if not complete and restore is not None:
                restore()
            if self._enter(record):
                return Verdict.FINISH if complete else Verdict.REPEAT
            hold_world = 0
        raise JobFailed(f"no group could be formed in {MAX_REFORMS} attempts: see the faults")

    def _enter_job(self) -> None:
        if self.rank < 0 and not self._enter(self._link.join(*self._policy)):
            self.regroup()

    def _enter(self, record: Record) -> bool:
        """Form the group of ``record``; ``False`` if another rank is lost meanwhile."""
        rank = [member for member, _ in record.members].index(self.member_id)
        entering = self.member_id in record.fill or not self._filled
        try:
            self._link.form(record, rank)
            self._transfer(record, rank)
        except RuntimeError as error:
            if not self.confirm(error):
                raise
            return False
        self.rank, self.world_size = rank, len(record.members)
        if entering:
            self._filled, self._committed = True, record.base_step
        self.regroup_agreed = record.again
        for wrapper in self.wrappers:
            self._rebuild(wrapper)
        self._link.formed(record.epoch)
        if self.member_id in record.fill:
            self._link.note(Kind.JOIN, record.base_step, {})
        for callback in self._callbacks:
            callback()
        return True

    def _transfer(self, record: Record, rank: int) -> None:
        if record.source is None:
            return
        order = [member for member, _ in record.members]
        if record.source == self.member_id:
            transfer.send(self.tracked.gather(), [order.index(member) for member in record.fill])
        elif self.member_id in record.fill:
            self.tracked.fill(transfer.receive(order.index(record.source)))

    def _rebuild(self, wrapper: ElasticDDP) -> None:
        wrapper.rebuild()
        wrapper.divisor = float(self.world_size)

    def _synchronised(self) -> bool:
        """Before step 0, copy rank 0's parameters to all; ``False`` if a rank was lost in it."""
        if self._committed > 0:
            return True
        try:
            for wrapper in self.wrappers:
                wrapper.synchronise(0)
        except RuntimeError as error:
            if not self.confirm(error):
                raise
            return False
        return True

    def _break_off(self) -> None:
        if not self._link.finish_early(self._committed, BREAK_S):
            self._link.leave("")

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Vote before the first optimizer of a step."""
        if self.current is None:
            return
        if all(item is not optimizer for item in self.tracked.optimizers()):
            raise LoopError(
                f"{type(optimizer).__name__}.step() inside a step, but it is not tracked:"
                " el.track(opt=optimizer)"
            )
        self.current.vote()
