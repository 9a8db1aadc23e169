"""Hung ranks: the pure decision, look by look, and whole jobs in which ranks hang."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pt214_elastic import hang
from pt214_elastic.events import Event, Kind
from pt214_elastic.hang import Limits, Suspicion, View, Where
from pt214_elastic.launch import Launcher

SCRIPT = Path(__file__).parent / "scripts" / "hang.py"
HANG_TIMEOUT_S = 2.0
PAUSE_S = 1.5 * HANG_TIMEOUT_S
LIMITS = Limits(idle_s=10.0, busy_s=100.0)
LATE = View(Where.INSIDE, (7, 2), 1)
AHEAD = View(Where.INSIDE, (7, 3), 1)  # began one more operation than LATE
AFTER = View(Where.INSIDE, (8, 1), 1)  # a step further
OUTSIDE = View(Where.OUTSIDE, (7, 2), 1)
BOUNDARY = View(Where.BOUNDARY, (7, 2), 1)
SCENE = {0: AHEAD, 1: LATE, 2: AHEAD}


def looks(seen: Sequence[tuple[dict[int, View], float]], since_s: float = 1.0) -> int | None:
    """Number of the look that finds member 1 hung, for (views, CPU seconds of member 1) each."""
    suspicion: Suspicion | None = None
    for number, (now, cpu_s) in enumerate(seen):
        member = hang.late(now)
        if member is None:
            suspicion = None
            continue
        suspicion = hang.weigh(suspicion, now, member, cpu_s, since_s)
        if hang.is_hung(suspicion, LIMITS):
            return number
    return None


@pytest.mark.parametrize(
    ("seen", "member"),
    [
        ((AHEAD, LATE, AHEAD), 1),
        ((AFTER, LATE, AFTER), 1),
        ((BOUNDARY, LATE, BOUNDARY), 1),  # a fault, and it does not report
        ((AHEAD, LATE, BOUNDARY), 1),
        ((AHEAD, LATE), 1),
        ((AHEAD, OUTSIDE, AHEAD), None),  # evaluates, saves
        ((OUTSIDE, LATE, AHEAD), None),
        ((AHEAD, LATE, LATE), None),  # two may wait for each other
        ((AHEAD, AHEAD, AHEAD), None),  # the network's matter
        ((BOUNDARY, BOUNDARY, BOUNDARY), None),
        ((LATE,), None),
        ((), None),
    ],
)
def test_only_one_that_all_others_wait_for_inside_a_step_is_late(
    seen: tuple[View, ...], member: int | None
) -> None:
    assert hang.late(dict(enumerate(seen))) == member


def test_an_idle_rank_is_hung_after_the_limit() -> None:
    assert looks([(SCENE, 5.0)] * 30) == 10


def test_a_long_compile_has_its_own_limit() -> None:
    assert looks([(SCENE, 1.0 * n) for n in range(99)]) is None
    assert looks([(SCENE, 1.0 * n) for n in range(130)]) == 100


def test_accusing_whoever_is_slow_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saboteur: CPU time is not looked at."""
    monkeypatch.setattr(hang, "BUSY_SHARE", math.inf)
    with pytest.raises(AssertionError):
        test_a_long_compile_has_its_own_limit()


def test_a_rank_that_stops_computing_gets_the_short_limit_from_then() -> None:
    assert looks([(SCENE, min(n, 20.0)) for n in range(60)]) == 30


def test_any_move_of_any_rank_starts_the_clocks_anew() -> None:
    for member, view in SCENE.items():
        moved = {**SCENE, member: replace(view, moves=2)}
        assert looks([(SCENE, 5.0)] * 10 + [(moved, 5.0)] * 30) == 20


def test_a_launcher_that_was_stopped_accuses_nobody_by_that() -> None:
    """A gap of an hour between two looks counts as one of MAX_LOOK_S."""
    assert looks([(SCENE, 5.0)] * 3, since_s=3600.0) is None


VIEWS = st.sampled_from([LATE, AHEAD, OUTSIDE, BOUNDARY])


@given(st.lists(st.tuples(VIEWS, st.floats(0, 2), st.integers(1, 30)), max_size=8))
def test_nobody_is_accused_before_all_stood_still_so_long(
    history: list[tuple[View, float, int]],
) -> None:
    """Whatever is seen: a verdict needs more than idle_s of looks in a row at the same scene."""
    suspicion: Suspicion | None = None
    cpu_s = 0.0
    for moves, (view, used_s, times) in enumerate(history):
        scene = {0: AHEAD, 1: replace(view, moves=moves)}
        for unchanged in range(times):
            cpu_s += used_s
            member = hang.late(scene)
            if member is None:
                suspicion = None
                continue
            suspicion = hang.weigh(suspicion, scene, member, cpu_s, 1.0)
            if hang.is_hung(suspicion, LIMITS):
                assert unchanged >= LIMITS.idle_s
                suspicion = None


# -- a whole job ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Event]]:
    events: list[Event] = []
    launcher = Launcher(
        [sys.executable, str(SCRIPT)],
        nproc=3,
        env={"OMP_NUM_THREADS": "1", "PAUSE_S": str(PAUSE_S)},
        hang_timeout_s=HANG_TIMEOUT_S,
        log_dir=tmp_path_factory.mktemp("hang"),
        on_event=events.append,
    )
    return launcher.run(), events


def test_a_rank_that_sleeps_for_ever_is_removed_and_the_job_goes_on(
    job: tuple[int, list[Event]],
) -> None:
    """Member 1 in time.sleep; member 3 in a C call that keeps the interpreter's lock."""
    code, events = job
    hung = [event for event in events if event.data.get("name") == "hang"]
    assert [event.member for event in hung] == [1, 3]
    assert all(event.data["idle_s"] >= HANG_TIMEOUT_S for event in hung)
    assert [e.step for e in events if e.kind is Kind.COMMIT] == list(range(12))
    final = [event.data["values"] for event in events if event.data.get("name") == "final"]
    assert len(final) == 3
    assert final[0] == final[1] == final[2]
    assert code == 0


def test_ranks_that_compute_or_rest_between_steps_are_not_accused(
    job: tuple[int, list[Event]],
) -> None:
    """Member 0 computes and member 2 rests outside, both longer than hang_timeout_s."""
    exits = {e.member: e.data["how"] for e in job[1] if e.kind is Kind.EXIT}
    assert exits == {0: "exit 0", 1: "SIGKILL", 2: "exit 0", 3: "SIGKILL", 4: "exit 0"}
