"""A step counts on every rank or on none; a twin without the vote must fail that."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import pytest
from pt214_elastic.events import Event, Kind
from pt214_elastic.launch import Launcher

SCRIPT = Path(__file__).parent / "scripts" / "dropped_vote.py"
HONEST, TWIN = range(3), range(3, 6)


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    found: list[Event] = []
    Launcher(
        [sys.executable, str(SCRIPT)],
        nproc=2,
        env={"OMP_NUM_THREADS": "1"},
        log_dir=tmp_path_factory.mktemp("vote"),
        on_event=found.append,
    ).run()
    return found


def counts_on_every_rank_or_on_none(events: list[Event], steps: range) -> None:
    applied: dict[int | None, list[int | None]] = defaultdict(list)
    for event in events:
        if event.data.get("name") == "applied" and event.step in steps:
            applied[event.step].append(event.member)
    assert {step: sorted(map(str, who)) for step, who in applied.items()} == {
        step: ["0", "1"] for step in steps
    }


def test_a_step_counts_on_every_rank_or_on_none(events: list[Event]) -> None:
    counts_on_every_rank_or_on_none(events, HONEST)
    repeated = [(e.step, e.member) for e in events if e.kind is Kind.REPEAT and e.step in HONEST]
    assert sorted(map(str, repeated)) == ["(1, 0)", "(1, 1)"]


def test_a_dropped_vote_would_be_caught(events: list[Event]) -> None:
    """A saboteur: from step 3 on the vote is always yes, and asks nobody."""
    with pytest.raises(AssertionError):
        counts_on_every_rank_or_on_none(events, TWIN)
    # And it can't pass unseen: the job ends rather than train on with ranks apart.
    assert "a member has applied step 5 and another cannot: base 4" in events[-1].data["reason"]
