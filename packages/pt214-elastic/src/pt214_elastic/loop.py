"""One training step that counts on every rank or on none.

    with step:                      snapshot of what changes early
        passes                      an error here: confirm, regroup, roll back, hand out again
        opt.step()  (pre-hook)      vote; after a fault: finish with the gradients kept, or Repeat
    exit                            vote if no optimizer did (a scaler skipped it); committed

Python cannot run a ``with`` body twice, so a repeated step is the same number yielded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from pt214_elastic import vote
from pt214_elastic.errors import LoopError, Repeat
from pt214_elastic.loader import Loader
from pt214_elastic.records import Verdict
from pt214_elastic.state import snapshot

if TYPE_CHECKING:
    from pt214_elastic.session import Elastic


class Step:
    """One attempt at one training step; ``n`` is its number, from 0.

    Attributes:
        n: the step's number.
        committed: whether it counts; known after the ``with`` block.
    """

    def __init__(self, elastic: Elastic, number: int) -> None:
        self.n = number
        self.committed = False
        self._elastic = elastic
        self._voted = False
        self._inside = False
        self._missing = 0
        self._restore: Callable[[], None] | None = None

    def __int__(self) -> int:
        return self.n

    def __repr__(self) -> str:
        return f"Step(n={self.n}, committed={self.committed})"

    def __enter__(self) -> Step:
        if self._inside or self.committed:
            raise LoopError(f"step {self.n} is entered a second time: take the next from el.steps")
        self._inside = True
        self._elastic.set_current(self)
        self._restore = snapshot(self._elastic.seat.tracked)
        return self

    def batches(self, loader: Loader) -> Iterator[tuple[Any, ...]]:
        """This rank's passes: the batch's parts, and the weight of its mean loss.

        Every rank makes the same number of passes; gradients are reduced in the last one.
        """
        seat = self._elastic.seat
        passes = loader.passes(self.n, seat.world_size, seat.rank)
        self._missing = len(passes)
        for wrapper in seat.wrappers:
            wrapper.divisor = 1.0
        for item in passes:
            for wrapper in seat.wrappers:
                wrapper.set_last_pass(self._missing == 1)
            self._missing -= 1
            yield loader.batch(item)

    def commit(self, *optimizers: Optimizer) -> None:
        """Vote once and step several optimizers; all their gradients must be complete."""
        self.vote()
        for optimizer in optimizers:
            optimizer.step()

    def vote(self) -> None:
        """Agree with all ranks that this step counts; returns only if it does.

        Raises:
            Repeat: a rank was lost and the step is undone.
            LoopError: passes are missing, or ranks drifted apart.
        """
        if self._voted:
            return
        if self._missing:
            raise LoopError(f"step {self.n}: {self._missing} passes of step.batches were not made")
        elastic = self._elastic
        try:
            if elastic.is_broken:
                raise RuntimeError("gloo: the epoch is broken")
            wanted = vote.cast(self.n, elastic.regroup_wanted, elastic.pending)
            elastic.seat.regroup_agreed |= wanted
        except RuntimeError as error:
            if not elastic.seat.confirm(error):
                raise
            if elastic.seat.recover(complete=True, restore=self._restore) is Verdict.REPEAT:
                raise Repeat from None
        self._voted = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        elastic = self._elastic
        try:
            if error is None:
                self.vote()
                self.committed = True
                elastic.note_committed(self.n)
                return False
            if self._repeats(error):
                elastic.note_repeat(self.n)
                return True
            elastic.leave(error)
            return False
        except Repeat:
            elastic.note_repeat(self.n)
            return True
        except Exception as failure:
            elastic.leave(failure)
            raise
        finally:
            self._inside = False
            elastic.set_current(None)

    def _repeats(self, error: BaseException) -> bool:
        """Whether ``error`` was a lost rank's doing, and the step has been rolled back."""
        if isinstance(error, Repeat):
            return True
        elastic = self._elastic
        if not isinstance(error, RuntimeError) or not elastic.seat.confirm(error):
            return False
        if self._voted:
            # The vote promised that this step counts; half of what follows it can't be undone.
            raise LoopError(
                f"step {self.n}: a collective failed after the vote; no collective may follow"
                " opt.step() inside the block"
            ) from error
        elastic.seat.recover(complete=False, restore=self._restore)
        return True
