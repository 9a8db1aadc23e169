"""Both ways to a new group in the same processes: in place, and destroyed and made anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pt214_elastic import reform
from pt214_elastic.errors import ReformFailed
from pt214_elastic.events import Event, Kind
from pt214_elastic.records import Record, Verdict
from pt214_elastic.reform import Group
from torch._C._distributed_c10d import HashStore

needs_reconfigure = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="torch before 2.14 changes no group in place"
)
STEPS = 8
ROUNDING = 1e-5  # sums in another order: float32, a few hundred terms of size 1


@pytest.fixture
def group() -> Iterator[Group]:
    yield Group(HashStore(), 5, "gloo", timedelta(seconds=30))
    if dist.is_initialized():
        dist.destroy_process_group()


def record(epoch: int, *handles: str) -> Record:
    members = tuple((5 + rank, handle) for rank, handle in enumerate(handles))
    return Record(epoch, members, 0, Verdict.REPEAT, (), None, False)


def total() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return float(tensor)


def break_reconfigure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**kwargs: Any) -> Any:
        raise TypeError("a later torch calls this otherwise")

    monkeypatch.setattr(dist, "_reconfigure", broken)


@needs_reconfigure
def test_the_group_object_stays_the_same_in_place(group: Group) -> None:
    group.form(record(1, group.handle()), 0)
    before = dist.group.WORLD
    group.form(record(2, group.handle()), 0)
    assert dist.group.WORLD is before
    assert total() == 1.0


@needs_reconfigure
def test_one_empty_handle_sends_all_the_long_way(group: Group) -> None:
    """A member that can't change its group in place must not be left behind by those that can."""
    monkey = record(1, "")
    group.form(monkey, 0)
    assert total() == 1.0
    assert group.handle() == ""


@needs_reconfigure
def test_two_failures_in_place_lead_to_the_long_way(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_reconfigure(monkeypatch)
    for epoch in (1, 2):
        with pytest.raises(ReformFailed, match="can't be changed in place: TypeError"):
            group.form(record(epoch, group.handle()), 0)
    assert group.handle() == ""
    group.form(record(3, group.handle()), 0)
    assert total() == 1.0


@needs_reconfigure
def test_trying_in_place_for_ever_would_be_caught(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saboteur: no failure makes the group give up."""
    monkeypatch.setattr(reform, "TRIES_IN_PLACE", 1_000_000)
    with pytest.raises(AssertionError):
        test_two_failures_in_place_lead_to_the_long_way(group, monkeypatch)


@needs_reconfigure
def test_failures_that_a_lost_rank_explains_do_not_count(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_reconfigure(patch)
        for epoch in (1, 2, 3):
            with pytest.raises(ReformFailed):
                group.form(record(epoch, group.handle()), 0)
            group.excuse()
    group.form(record(4, group.handle()), 0)
    assert total() == 1.0


@needs_reconfigure
def test_a_handle_that_torch_refuses_is_an_empty_one(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(dist, "_get_reconfigure_handle")
    assert group.handle() == ""
    group.form(record(1, group.handle()), 0)
    assert total() == 1.0


# -- whole jobs: a rank is killed, a replacement enters, and once more -----------------------------


@pytest.fixture(scope="module", params=[pytest.param("failing", marks=needs_reconfigure), "old"])
def job(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    job_of: Callable[..., tuple[int, list[Event]]],
) -> tuple[int, list[Event]]:
    """``old``: no torch < 2.14 feature; ``failing``: member 1's ``_reconfigure`` raises."""
    faults = [[2, 2, "forward", "SIGKILL"], [5, 3, "vote", "SIGKILL"]]
    folder = tmp_path_factory.mktemp(request.param)
    found = job_of(folder, 3, STEPS, faults, min_ranks=3, TORCH=request.param)
    warned = "made anew from now on" in (folder / "member-1.err").read_text()
    assert warned is (request.param == "failing")
    return found


def test_the_long_way_carries_faults_and_joiners(
    job: tuple[int, list[Event]], plainly: Callable[..., list[list[float]]]
) -> None:
    code, events = job
    assert code == 0
    final = [event for event in events if event.data.get("name") == "final"]
    assert [event.data["world"] for event in final] == [3, 3, 3]
    assert len({json.dumps(event.data["values"]) for event in final}) == 1
    pairs = zip(final[0].data["values"], plainly(STEPS), strict=True)
    assert max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True)) < ROUNDING
    assert [e.step for e in events if e.kind is Kind.COMMIT] == list(range(STEPS))


def test_survivors_keep_their_processes_on_the_long_way(job: tuple[int, list[Event]]) -> None:
    exits = {e.member: e.data["how"] for e in job[1] if e.kind is Kind.EXIT}
    assert exits == {0: "exit 0", 1: "exit 0", 2: "SIGKILL", 3: "SIGKILL", 4: "exit 0"}
    assert {event.member for event in job[1] if event.kind is Kind.JOIN} == {3, 4}


def test_too_few_ranks_train_nothing_until_a_joiner_comes(job: tuple[int, list[Event]]) -> None:
    """min_ranks is 3: after the interrupted step, which may be finished by two, two train none."""
    worlds = {e.epoch: e.data["world_size"] for e in job[1] if e.kind is Kind.EPOCH}
    commits = [e for e in job[1] if e.kind is Kind.COMMIT]
    assert {worlds[e.epoch] for e in commits} <= {2, 3}
    assert [e.step for e in commits if worlds[e.epoch] == 2] in ([], [2], [5], [2, 5])
