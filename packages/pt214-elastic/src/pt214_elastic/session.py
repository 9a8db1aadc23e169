"""A worker's side of an elastic job, as the user sees it: the state, the loop, the world.

init -> (joiners wait at the first track or steps) -> steps -> done
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pt214_elastic.ddp import ElasticDDP
from pt214_elastic.errors import JobFailed, LoopError
from pt214_elastic.events import Kind
from pt214_elastic.link import Link
from pt214_elastic.loader import Loader
from pt214_elastic.loop import Step
from pt214_elastic.options import OnFault
from pt214_elastic.pending import Pending
from pt214_elastic.seat import Seat

MAX_REPEATS = 20  # of one step: a link that breaks each time is no lost rank
BREAK_S = 2.0  # after ``break``: how long the others have to break too


class Elastic:
    """What :func:`pt214_elastic.init` returns; one per process.

    Attributes:
        seat: rank, world and epochs.
        current: the step under way.
        pending: its collectives in flight.
    """

    def __init__(self, link: Link, on_fault: OnFault | None, min_ranks: int | None) -> None:
        self.current: Step | None = None
        self._link = link
        self.seat = Seat(link, on_fault, min_ranks)
        self.pending = Pending(lambda: self.is_broken)
        link.on_broken = self.pending.abandon
        self._repeats = (-1, 0)
        register_optimizer_step_pre_hook(self._before_optimizer)
        if link.job_epoch == 0:
            self.seat.enter_job()

    @property
    def rank(self) -> int:
        """This process's rank, -1 while it waits to enter."""
        return self.seat.rank

    @property
    def world_size(self) -> int:
        """Ranks of this epoch."""
        return self.seat.world_size

    @property
    def member_id(self) -> int:
        """This process's id in the job; it never changes and is never reused, as ranks are."""
        return self._link.member

    @property
    def epoch(self) -> int:
        """Counts the re-formations, from 1; 0 while waiting to enter."""
        return self._link.epoch if self.rank >= 0 else 0

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The default process group; the same object in all epochs where torch allows."""
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
        self.seat.wrappers.append(wrapper)
        if self.rank >= 0:
            self.seat.rebuild(wrapper)
        return wrapper

    def track(self, **objects: Any) -> None:
        """Make these objects part of the training state.

        They are rolled back when a step repeats and sent to joiners; in a joiner, they are filled
        before this returns, if the job has state already.

        Raises:
            StateError: an object has no ``state_dict``, or the peer sent none for it.
        """
        self.seat.tracked.add(objects)
        self.seat.enter_job()

    def loader(self, dataset: Any, global_batch: int, **options: Any) -> Loader:
        """Deal a map-style dataset over the ranks; see :class:`Loader` for the options."""
        return Loader(dataset, global_batch, **options)

    def on_epoch(self, callback: Callable[[], Any]) -> None:
        """Have ``callback()`` called after each re-formation; it may read rank and world size."""
        self.seat.callbacks.append(callback)

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
        self.seat.enter_job()
        deadline_s = time.monotonic() + timeout_s
        while self.world_size < n and self._link.can_heal:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            self.seat.regroup(hold_world=n, hold_s=left_s)
        return self.world_size

    def steps(self, n: int) -> Iterator[Step]:
        """Hand out the steps up to number ``n - 1``, each until it is committed.

        Raises:
            JobFailed: the job cannot go on.
            RankLost: a rank was lost and ``on_fault`` is ``"raise"``.
        """
        self.seat.enter_job()
        seat, step = self.seat, None
        try:
            while True:
                if self.is_broken or seat.regroup_agreed:
                    seat.recover() if self.is_broken else seat.regroup()
                elif seat.committed >= n:
                    if seat.regroup(done=True) is None:
                        return
                elif seat.synchronise():
                    step = Step(self, seat.committed)
                    yield step
        except GeneratorExit:
            if step is not None and not self._link.left:
                self._break_off()
            raise

    # -- for the step -----------------------------------------------------------------------

    def set_current(self, step: Step | None) -> None:
        """A step begins here, or ends."""
        self.current = step
        if step is None:
            self._link.progress.leave()
        else:
            self._link.progress.enter(step.n)

    def note_committed(self, number: int) -> None:
        """The step is applied here."""
        self.seat.committed = number + 1
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

    # -- pieces -----------------------------------------------------------------------------

    def _break_off(self) -> None:
        if not self._link.finish_early(self.seat.committed, BREAK_S):
            self._link.leave("")

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        """Vote before the first optimizer of a step."""
        if self.current is None:
            return
        if all(item is not optimizer for item in self.seat.tracked.optimizers()):
            raise LoopError(
                f"{type(optimizer).__name__}.step() inside a step, but it is not tracked:"
                " el.track(opt=optimizer)"
            )
        self.current.vote()
