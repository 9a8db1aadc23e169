"""A row says what was measured, how sure it is, and who was not there."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import harness
import machine
import pytest
from paired import COVERAGE, paired, rank_of
from report import table


def covered(rounds: int, at: int) -> float:
    """By counting: of all 2**n ways that ratios can lie about the median, those inside."""
    sides = itertools.product((0, 1), repeat=rounds)
    inside: int = sum(at <= sum(side) <= rounds - at for side in sides)
    return inside / 2**rounds


@pytest.mark.parametrize("rounds", range(1, 16))
def test_the_interval_covers_what_counting_says_and_no_narrower_one_does(rounds: int) -> None:
    at, coverage = rank_of(rounds)
    assert coverage == pytest.approx(covered(rounds, at) if rounds > 1 else 0.0)
    assert (coverage >= COVERAGE) == (rounds >= 5)
    if coverage >= COVERAGE and at < rounds // 2:
        assert covered(rounds, at + 1) < COVERAGE


def test_ratios_are_of_the_same_round() -> None:
    pair = paired([1.0, 2.0, 4.0, 1.0, 2.0], [2.0, 4.0, 8.0, 2.0, 4.0])
    assert (pair.median, pair.low, pair.high) == (2, 2, 2)  # medians alone would spread


@pytest.mark.parametrize("figures", [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_figures_that_cannot_be_compared_are_refused(figures: Any) -> None:
    with pytest.raises(ValueError, match=r"rounds|above 0"):
        paired(*figures)


def test_nan_is_no_figure() -> None:
    with pytest.raises(ValueError, match="finite"):
        paired([1.0], [math.nan])


def test_an_absent_rival_has_no_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT214_BENCH_OUT", str(tmp_path))
    found = harness.rows("save", "s", {"ours": [1.0] * 5, "raw": [2.0] * 5}, missing=["other"])
    result = json.loads(harness.report("q", found, folder=tmp_path).read_text())
    raw, other = result["rows"]
    assert raw["interval"] == [2, 2]
    assert raw["rounds"] == 5
    assert other["ratio"] is None
    assert other["absent"] == "not installed"
    assert harness.shown(other).endswith("other not installed")
    assert "| save | 1 s | other | not installed |  |" in table([result])


def test_turns_alternate_so_that_nobody_always_goes_first() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    harness.in_turns(calls, 3)
    assert "".join(order) == "abbaab"


def test_facts_name_the_machine_but_not_its_owner(tmp_path: Path) -> None:
    facts = machine.facts(tmp_path)
    wanted = {"processor", "cpus", "memory_gib", "disk", "gpu", "python"}
    assert wanted <= facts.keys()
    assert facts["memory_gib"] > 0
    assert str(tmp_path) not in json.dumps(facts)
    assert "torch" in machine.versions()
