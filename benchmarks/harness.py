"""What the benchmarks share: turns, medians, and the JSON that reports are made from.

Candidates take turns, round after round, so a slow spell of the machine meets them all. A ratio is
the rival's median over ours: above 1 means that we are better. ``spread`` is how far apart the
middle half of the per-round ratios lies.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def gib() -> float:
    """Size of the large states; ``PT214_BENCH_GIB`` makes a run shorter."""
    return float(os.environ.get("PT214_BENCH_GIB", "2"))


def rounds(default: int = 5) -> int:
    """How many turns each candidate takes."""
    return int(os.environ.get("PT214_BENCH_ROUNDS", default))


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def in_turns(
    candidates: Mapping[str, Callable[[], float]], turns: int | None = None
) -> dict[str, list[float]]:
    """Figures of each candidate; each call measures itself and returns its figure."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns or rounds()):
        names = list(candidates)
        for name in names if turn % 2 == 0 else names[::-1]:
            found[name].append(candidates[name]())
    return found


def rows(case: str, unit: str, figures: Mapping[str, list[float]], ours: str = "ours") -> list[Row]:
    """One row a rival."""
    mine = figures[ours]
    found = []
    for name, theirs in figures.items():
        if name == ours:
            continue
        ratios = sorted(b / a for a, b in zip(mine, theirs, strict=True))
        middle = ratios[len(ratios) // 4 : -(len(ratios) // 4) or None]
        found.append(
            {
                "case": case,
                "unit": unit,
                "ours": statistics.median(mine),
                "rival": statistics.median(theirs),
                "rival_name": name,
                "ratio": statistics.median(theirs) / statistics.median(mine),
                "spread": middle[-1] - middle[0],
            }
        )
    return found


def report(question: str, found: list[Row], benchmark: Any = None) -> Path:
    """Write ``results/<question>-<machine>.json`` and show the rows."""
    name = f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cpu"
    result = {
        "question": question,
        "machine": {"name": name, "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {"torch": torch.__version__},
        "rounds": rounds(),
        "gib": gib(),
        "rows": found,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{question}-{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    if benchmark is not None:
        benchmark.extra_info["rows"] = found
        benchmark.pedantic(lambda: None, rounds=1)
    for row in found:
        print(
            f"{row['case']}: ours {row['ours']:.4g} {row['unit']}, {row['rival_name']} "
            f"{row['rival']:.4g}, ratio {row['ratio']:.2f} (spread {row['spread']:.2f})"
        )
    return path
