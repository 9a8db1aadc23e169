"""A healthy run shows every claim; each broken run fails exactly the claim it breaks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pt214.demo.options import FaultKind, Options
from pt214.demo.timeline import Timeline

OPTIONS = Options(ranks=4, steps=30, fault=FaultKind.KILL, text=None, out=Path())
VICTIM, JOINER, HIT_AT, JOIN_AT = 2, 4, 10, 20


FIRST, SECOND, THIRD = [0, 1, VICTIM, 3], [0, 1, 3], [0, 1, 3, JOINER]


def run(
    worlds: tuple[list[int], ...] = (FIRST, SECOND, THIRD),
    pid_at_end: int = 100,
    commit_twice: int | None = None,
    tell_twice: int | None = None,
    skip: int | None = None,
    resumed: tuple[float, ...] = (2.5, 2.5),
    last_save: int = 29,
) -> Timeline:
    """A run of 30 steps, one second each; the victim dies at 10.5 s, the joiner enters at 20 s."""
    timeline = Timeline(start_s=0.0)
    for time_s, members in zip((0.0, 10.6, 20.0), worlds, strict=False):
        timeline.on_epoch(time_s, members)
    for member in FIRST:
        timeline.on_custom(member, {"name": "begin", "pid": 100 + member})
    for step in range(30):
        epoch = 1 + (step >= HIT_AT) + (step >= JOIN_AT)
        for _ in range((step != skip) + (step == commit_twice)):
            timeline.on_commit(step + 1.0, step, epoch)
        for member in (FIRST, SECOND, THIRD)[epoch - 1]:
            for _ in range((step != skip) + (step == tell_twice)):
                timeline.on_custom(member, {"name": "trained", "step": step, "loss": 0.5})
    timeline.on_fault(10.5, VICTIM, HIT_AT - 1, 1)
    save = {"name": "saved", "step": last_save, "held_out_loss": 2.5}
    for member in (0, 1, 3, JOINER):
        facts = {
            "blocked_s": 0.01, "durable_s": 0.1 * member, "size_bytes": 40, "world_size": 4,
        }  # fmt: skip
        timeline.on_custom(member, {**save, **facts})
    for member in (0, 1, 3):
        timeline.on_custom(member, {"name": "finish", "pid": pid_at_end + member})
    for loss in resumed:
        timeline.on_custom(0, {"name": "resumed", "held_out_loss": loss})
    return timeline


def failed(timeline: Timeline) -> list[str]:
    return [claim.text for claim in timeline.claims(OPTIONS) if not claim.holds]


def test_a_healthy_run_shows_every_claim() -> None:
    timeline = run()
    assert failed(timeline) == []
    assert timeline.world_sizes == [4, 3, 4]
    assert timeline.recovery_s == pytest.approx(0.5)
    assert timeline.losses[5] == pytest.approx(4 * 0.5)
    (checkpoint,) = timeline.checkpoints
    assert (checkpoint.size_bytes, checkpoint.world_size) == (40, 4)
    assert checkpoint.durable_s == pytest.approx(0.4)


def test_a_save_that_the_victim_never_told_of_has_all_its_ranks() -> None:
    timeline = Timeline(start_s=0.0)
    facts = {"blocked_s": 0.01, "durable_s": 0.1, "size_bytes": 40, "world_size": 4}
    for member in (0, 1, 3):
        save = {"name": "saved", "step": 5, "held_out_loss": 2.5}
        timeline.on_custom(member, {**save, **facts})
    (checkpoint,) = timeline.checkpoints
    assert (checkpoint.world_size, checkpoint.size_bytes) == (4, 40)


def test_a_loss_is_told_once_every_rank_has_told_its_part() -> None:
    timeline = Timeline(start_s=0.0)
    timeline.on_epoch(0.0, [0, 1])
    timeline.on_custom(0, {"name": "trained", "step": 0, "loss": 1.5})
    timeline.on_commit(1.0, 0, 1)
    assert timeline.newest_loss() is None
    timeline.on_custom(1, {"name": "trained", "step": 0, "loss": 2.0})
    assert timeline.newest_loss() == (0, 3.5)
    timeline.on_custom(0, {"name": "trained", "step": 1, "loss": 1.0})
    assert timeline.newest_loss() == (0, 3.5)


def test_failed_saves_are_told_once_with_their_number() -> None:
    timeline = Timeline(start_s=0.0)
    for step in range(20):
        timeline.on_custom(0, {"name": "save_failed", "step": step, "error": "disk full"})
    assert timeline.why_not_saved() == "step 0: disk full (and 19 more, on all ranks)"


@pytest.mark.parametrize(
    ("broken", "claim"),
    [
        (lambda: run(worlds=(FIRST, SECOND)), "world size went 4 -> 3 -> 4"),
        (lambda: run(pid_at_end=900), "no surviving process changed"),
        (lambda: run(commit_twice=HIT_AT), "every step was committed exactly once"),
        (lambda: run(tell_twice=HIT_AT), "every step was committed exactly once"),
        (lambda: run(skip=HIT_AT), "every step was committed exactly once"),
        (lambda: run(resumed=(2.5, 2.6)), "loaded on 2 ranks"),
        (lambda: run(resumed=(2.5,)), "loaded on 2 ranks"),
        (lambda: run(last_save=24), "the last step (29) is in the last checkpoint"),
    ],
)
def test_each_broken_run_fails_its_claim(broken: Callable[[], Timeline], claim: str) -> None:
    (found,) = failed(broken())
    assert found.startswith(claim)


def test_a_run_that_never_goes_on_has_no_recovery() -> None:
    timeline = Timeline(start_s=0.0)
    timeline.on_commit(1.0, 0, 1)
    timeline.on_fault(2.0, 1, 0, 1)
    timeline.on_commit(2.1, 1, 1)  # sent before the hit, noted after it
    assert timeline.recovery_s is None
    assert "training went on after the fault" in failed(timeline)
