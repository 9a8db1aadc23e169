"""What the benchmarks share: turns, rows, and the JSON that reports are made from.

Candidates take turns, round after round, so a slow spell of the machine meets them all. A ratio is
the rival's figure over ours of the same round: above 1 means that we are better, where less is
better. A row holds its median and its 90 % interval (see ``paired.py``). A rival that is not
installed has a row that says so, and no ratio: nobody passes against the absent.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import machine
from paired import paired

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
Figure = TypeVar("Figure")


def gib() -> float:
    """Size of the large states; ``PT214_BENCH_GIB`` makes a run shorter."""
    return float(os.environ.get("PT214_BENCH_GIB", "2"))


def rounds(default: int = 5) -> int:
    """How many turns each candidate takes: ``PT214_BENCH_ROUNDS``, else the benchmark's own."""
    return int(os.environ.get("PT214_BENCH_ROUNDS", default))


def results() -> Path:
    """Where JSON goes: ``results/``, or ``PT214_BENCH_OUT``, for runs that prove nothing."""
    return Path(os.environ.get("PT214_BENCH_OUT", RESULTS))


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turns(
    candidates: Mapping[str, Callable[[], Figure]], turns: int | None = None
) -> dict[str, list[Figure]]:
    """Figures of each candidate; each call measures itself and returns its figure."""
    found: dict[str, list[Figure]] = {name: [] for name in candidates}
    for turn in range(turns or rounds()):
        names = list(candidates)
        for name in names if turn % 2 == 0 else names[::-1]:
            found[name].append(candidates[name]())
    return found


def row(
    case: str,
    unit: str,
    ours: float,
    rival: float,
    rival_name: str = "bound",
    ratio: float | None = None,
) -> Row:
    """A row of single figures; the ratio is the rival's over ours unless given."""
    ratio = rival / ours if ratio is None else ratio
    return {
        "case": case, "unit": unit, "ours": ours, "rival": rival, "rival_name": rival_name,
        "ratio": ratio, "interval": None, "coverage": None, "rounds": 1,
    }  # fmt: skip


def absent(case: str, unit: str, ours: float, rival_name: str, why: str = "not installed") -> Row:
    """The row of a rival that did not run."""
    return {
        "case": case, "unit": unit, "ours": ours, "rival": None, "rival_name": rival_name,
        "ratio": None, "interval": None, "coverage": None, "rounds": 0, "absent": why,
    }  # fmt: skip


def rows(
    case: str,
    unit: str,
    figures: Mapping[str, list[float]],
    ours: str = "ours",
    missing: Iterable[str] = (),
) -> list[Row]:
    """One row a rival, and one for each that is ``missing``."""
    mine = figures[ours]
    found = []
    for name, theirs in figures.items():
        if name == ours:
            continue
        pair = paired(mine, theirs)
        found.append(
            row(case, unit, statistics.median(mine), statistics.median(theirs), name, pair.median)
            | {
                "interval": [pair.low, pair.high],
                "coverage": pair.coverage,
                "rounds": len(pair.ratios),
                "ratios": list(pair.ratios),
                "figures": {"ours": list(mine), "rival": list(theirs)},
            }
        )
    return found + [absent(case, unit, statistics.median(mine), name) for name in missing]


def report(
    question: str,
    found: list[Row],
    benchmark: Any = None,
    *,
    folder: Path | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``<question>-<machine>.json`` and show the rows.

    Args:
        question: what was asked, as ``dcp_save_large``.
        found: the rows.
        benchmark: pytest-benchmark's fixture, which keeps them in its history.
        folder: where the benchmark wrote: its file system is named.
        notes: anything else that a reader must know, as how caches were dropped.
    """
    result = {
        "question": question,
        "machine": machine.facts(folder),
        "versions": machine.versions(),
        "gib": gib(),
        "notes": dict(notes or {}),
        "rows": found,
    }
    results().mkdir(parents=True, exist_ok=True)
    path = results() / f"{question}-{machine.name()}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if benchmark is not None:
        benchmark.extra_info["rows"] = found
        benchmark.pedantic(lambda: None, rounds=1)
    for each in found:
        print(shown(each))
    return path


def shown(found: Row) -> str:
    """A row as one line of text."""
    line = f"{found['case']}: ours {found['ours']:.4g} {found['unit']}, {found['rival_name']} "
    if found["ratio"] is None:
        return line + found["absent"]
    line += f"{found['rival']:.4g}, ratio {found['ratio']:.2f}"
    if found["interval"] is None:
        return line
    low, high = found["interval"]
    of = "min to max" if found["coverage"] < 0.9 else "90 % in"
    return f"{line} ({of} {low:.2f} to {high:.2f}, {found['rounds']} rounds)"
