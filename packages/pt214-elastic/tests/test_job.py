"""Whole jobs on gloo: one job takes every kind of fault, and is compared with plain PyTorch."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from pt214_elastic import deal
from pt214_elastic.events import Event, Kind

STEPS = 36
FAULTS = [
    [4, 0, "forward", "SIGKILL"],  # rank 0; member 4 comes
    [9, 1, "vote", "SIGKILL"],  # two at once, gradients complete; 5 and 6 come
    [9, 2, "vote", "SIGKILL"],
    [14, 3, "forward", "SIGSTOP"],  # a hang; 7 comes
    [20, 4, "forward", "SIGKILL"],  # and member 5 in the recovery from it; 8 and 9 come
    [26, 6, "forward", "error"],  # 10 comes
    [31, 7, "after", "SIGKILL"],  # its vote had passed
]
WAIT_AFTER = [6, 11, 16, 22, 28, 33]
ROUNDING = 1e-5  # sums in another order: float32, a few hundred terms of size 1


@pytest.fixture(scope="module")
def job(
    tmp_path_factory: pytest.TempPathFactory, job_of: Callable[..., tuple[int, list[Event]]]
) -> tuple[list[Event], Path]:
    folder = tmp_path_factory.mktemp("job")
    _, events = job_of(folder, 4, STEPS, FAULTS, WAIT_AFTER, BOMB="5", SABOTEURS="1")
    return events, folder


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.data.get("name") == name]


def distance(one: list[list[float]], two: list[list[float]]) -> float:
    pairs = zip(one, two, strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x, y, strict=True))


def test_parameters_are_bitwise_equal_on_all_ranks_at_the_end(
    job: tuple[list[Event], Path],
) -> None:
    final = named(job[0], "final")[:4]  # the saboteurs after it end in a replacement's own
    assert len(final) == 4
    assert {event.data["world"] for event in final} == {4}
    assert len({json.dumps(event.data["values"]) for event in final}) == 1


def test_parameters_are_bitwise_equal_after_each_step(job: tuple[list[Event], Path]) -> None:
    digests: dict[int, set[str]] = defaultdict(set)
    for event in named(job[0], "seen"):
        if event.step is not None and event.step < STEPS:
            digests[event.step].add(event.data["digest"])
    assert sorted(digests) == list(range(STEPS))
    assert all(len(found) == 1 for found in digests.values())


def test_the_result_is_that_of_plain_pytorch(
    job: tuple[list[Event], Path], plainly: Callable[..., list[list[float]]]
) -> None:
    values = named(job[0], "final")[0].data["values"]
    assert distance(values, plainly(STEPS)) < ROUNDING


def test_a_stale_divisor_would_be_caught(
    job: tuple[list[Event], Path], plainly: Callable[..., list[list[float]]]
) -> None:
    """A saboteur: the step after the first fault scaled by the old world, as DDP does."""
    values = named(job[0], "final")[0].data["values"]
    assert distance(values, plainly(STEPS, {4: 4 / 3})) > ROUNDING


def test_no_sample_is_lost_or_doubled(job: tuple[list[Event], Path]) -> None:
    # Of several attempts at a step the last one counts, and all its ranks took part in it:
    # those too that died between their gradients and the end of the step.
    dealt: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for event in named(job[0], "dealt"):
        if event.step is not None:
            dealt[event.step][event.epoch] += event.data["samples"]
    for step in range(STEPS):
        last = dealt[step][max(dealt[step])]
        assert sorted(last) == sorted(deal.samples_of(step, 50, 10, seed=0)), step


def test_each_step_commits_once_and_in_order(job: tuple[list[Event], Path]) -> None:
    steps = [event.step for event in job[0] if event.kind is Kind.COMMIT]
    assert steps[:STEPS] == list(range(STEPS))
    assert len(steps) == len(set(steps))


def test_every_fault_is_healed_by_a_replacement(job: tuple[list[Event], Path]) -> None:
    exits = {e.member: e.data["how"] for e in job[0] if e.kind is Kind.EXIT}
    assert [exits[m] for m in (0, 1, 2, 3, 4, 5, 7)] == ["SIGKILL"] * 7
    assert exits[6] == "exit 1"
    joined = {event.member for event in job[0] if event.kind is Kind.JOIN}
    assert joined >= {4, 5, 6, 7, 8, 9, 10}


def test_a_hang_is_seen_by_the_process_state(job: tuple[list[Event], Path]) -> None:
    assert [event.member for event in named(job[0], "hang")] == [3]


def test_a_users_error_is_in_the_log_of_its_rank(job: tuple[list[Event], Path]) -> None:
    text = (job[1] / "member-6.err").read_text()
    assert "ValueError: a mistake in the user's code" in text


def test_no_all_reduce_would_be_caught(job: tuple[list[Event], Path]) -> None:
    digests = {event.data["digest"] for event in named(job[0], "no_all_reduce")}
    assert len(digests) == 4


def test_a_skipped_step_is_caught_by_the_vote(job: tuple[list[Event], Path]) -> None:
    errors = [event.data["error"] for event in named(job[0], "skipped_step")]
    assert errors
    assert all("ranks are in steps" in error for error in errors)


def test_events_are_json_lines_in_order(job: tuple[list[Event], Path]) -> None:
    rows = [json.loads(line) for line in (job[1] / "events.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == [str(event.kind) for event in job[0]]
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
