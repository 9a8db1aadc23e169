"""A repeated step starts where its first attempt started; each missing rollback is caught.

One process, one rank, and a link that says a rank was lost: the loop can't tell the difference.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pt214_elastic import loop, state
from pt214_elastic.errors import JobFailed, LoopError
from pt214_elastic.link import Link
from pt214_elastic.loop import Step
from pt214_elastic.records import Record, Verdict
from pt214_elastic.session import Elastic
from torch import nn

LOST = "gloo: connection closed by peer"
Result = dict[str, Any]


class Healing(Link):
    """Believes each error to be a lost rank's, and lets the step repeat."""

    can_heal = True
    broken = False

    def is_broken(self) -> bool:
        return self.broken

    def suspect(self, text: str, timeout_s: float) -> bool:
        self.broken = True
        return True

    def report(
        self,
        committed: int,
        complete: bool,
        filled: bool,
        hold_world: int = 0,
        hold_s: float = 0.0,
        done: bool = False,
    ) -> Record | None:
        self.broken = False
        self.epoch += 1
        again = Record(self.epoch, ((0, ""),), committed, Verdict.REPEAT, (), None, False)
        return None if done else again


class Counter:
    """Tracked, and changed early in a step."""

    def __init__(self) -> None:
        self.value = [0]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.fixture
def session() -> Iterator[Elastic]:
    yield Elastic(Healing("gloo", timedelta(seconds=30)), None, None)
    dist.destroy_process_group()


def train(el: Elastic, failing: set[int]) -> Result:
    """Four steps, each of which changes everything that a rollback must put back."""
    torch.manual_seed(1)
    random.seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counter, left = Counter(), set(failing)
    el.track(model=model, opt=opt, counter=counter)
    net = el.wrap_ddp(model)
    draws: list[float] = []
    for step in el.steps(4):
        with step:
            counter.value[0] += 1
            draw = random.random()
            opt.param_groups[0]["lr"] *= 0.9
            (draw * net(torch.randn(4, 2)).square().mean()).backward()
            if step.n in left:
                left.discard(step.n)
                raise RuntimeError(LOST)
            opt.step()
            opt.zero_grad(set_to_none=False)
        if step.committed:
            draws.append(draw)
    return {
        "draws": draws,
        "next": (random.random(), float(torch.rand(()))),
        "values": [item.tolist() for item in model.state_dict().values()],
        "count": counter.value,
        "lr": opt.param_groups[0]["lr"],
    }


def fresh(train_it: Callable[[Elastic], Result]) -> Result:
    el = Elastic(Healing("gloo", timedelta(seconds=30)), None, None)
    try:
        return train_it(el)
    finally:
        dist.destroy_process_group()


def test_repeated_steps_leave_no_trace() -> None:
    assert fresh(lambda el: train(el, {0, 2})) == fresh(lambda el: train(el, set()))


NOTHING: dict[str, Any] = {
    "_random_state": lambda: lambda: None,
    "_buffers": lambda module: lambda: None,
    "_gradients": lambda tracked: lambda: None,
    "_hyperparameters": lambda optimizer: lambda: None,
    "_whole": lambda item: lambda: None,
}


@pytest.mark.parametrize("name", NOTHING)
def test_a_missing_rollback_would_be_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saboteurs: each leaves out one kind of early change."""
    monkeypatch.setattr(state, name, NOTHING[name])
    with pytest.raises(AssertionError):
        test_repeated_steps_leave_no_trace()


def test_no_rollback_at_all_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "snapshot", lambda tracked: lambda: None)
    with pytest.raises(AssertionError):
        test_repeated_steps_leave_no_trace()


def run_steps(el: Elastic, body: Callable[[Step], Any]) -> None:
    for step in el.steps(2):
        with step:
            body(step)


def fail(error: Exception) -> None:
    raise error


def test_a_users_error_is_not_swallowed(session: Elastic) -> None:
    with pytest.raises(ValueError, match="the user's"):
        run_steps(session, lambda step: fail(ValueError("the user's")))


def test_a_step_that_always_fails_ends_the_job(session: Elastic) -> None:
    with pytest.raises(JobFailed, match="step 0 was repeated 20 times"):
        run_steps(session, lambda step: fail(RuntimeError(LOST)))


def test_a_step_entered_twice_is_refused(session: Elastic) -> None:
    step = next(session.steps(2))
    with step:
        pass
    with pytest.raises(LoopError, match="step 0 is entered a second time"):
        step.__enter__()


def test_passes_that_were_not_made_are_refused(session: Elastic) -> None:
    data = session.loader([torch.ones(1)] * 4, global_batch=4, micro_batch=2)
    with pytest.raises(LoopError, match=r"step 0: 1 passes of step\.batches were not made"):
        run_steps(session, lambda step: next(step.batches(data)))


def test_an_optimizer_that_is_not_tracked_is_refused(session: Elastic) -> None:
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(LoopError, match=r"SGD\.step\(\) inside a step, but it is not tracked"):
        run_steps(session, lambda step: opt.step())


def test_a_collective_after_the_vote_is_refused(session: Elastic) -> None:
    def body(step: Step) -> None:
        step.vote()
        raise RuntimeError(LOST)

    with pytest.raises(LoopError, match="a collective failed after the vote"):
        run_steps(session, body)
