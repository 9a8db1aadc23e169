"""What does each part add to ``import torch``?

Every sample is a fresh Python process that reads the clock around its imports: torch first, then
the part, so the sample holds both figures and a slow spell of the machine meets both. Samples of
all parts are taken in turn. ``ratio`` is the bound of 50 ms over the median that the part adds, so
above 1 is within the bound; ``rival`` is ``import torch`` itself.

Run with ``pytest benchmarks/bench_import.py``; it writes
``benchmarks/results/import-<machine>.json``.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PARTS = ("pt214", "pt214_mps", "pt214_inductor", "pt214_elastic", "pt214_dcp")
ROUNDS = 7
BOUND_MS = 50.0
SAMPLE = """
import importlib, json, sys, time
begin = time.perf_counter()
import torch
torch_s = time.perf_counter() - begin
begin = time.perf_counter()
importlib.import_module(sys.argv[1])
print(json.dumps([torch_s, time.perf_counter() - begin, torch.__version__]))
"""


def sample(part: str) -> tuple[float, float, str]:
    """Milliseconds of ``import torch``, those that ``part`` adds, and torch's version."""
    command = [sys.executable, "-W", "ignore", "-c", SAMPLE, part]
    # With bytecode, as everybody's second import is: PYTHONDONTWRITEBYTECODE would compile it anew.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
    told = done.stdout
    torch_s, part_s, version = json.loads(told)
    return 1e3 * torch_s, 1e3 * part_s, version


def rows() -> tuple[list[dict[str, Any]], str]:
    """One row a part, and torch's version."""
    samples: dict[str, list[tuple[float, float, str]]] = {part: [] for part in PARTS}
    for turn in range(ROUNDS + 1):
        for part in PARTS:
            taken = sample(part)
            if turn:  # the first writes the bytecode
                samples[part].append(taken)
    found = []
    for part, figures in samples.items():
        added = sorted(part_ms for _, part_ms, _ in figures)
        ours = statistics.median(added)
        found.append(
            {
                "case": f"import {part} after torch",
                "unit": "ms",
                "ours": round(ours, 1),
                "rival": round(statistics.median(torch_ms for torch_ms, _, _ in figures), 1),
                "rival_name": "import torch",
                "ratio": round(BOUND_MS / max(ours, 1e-3), 2),
                "spread": round((added[-2] - added[1]) / max(ours, 1e-3), 2),
            }
        )
    return found, samples[PARTS[0]][0][2]


@pytest.mark.benchmark
def test_each_part_adds_little_to_import_torch(benchmark: Any) -> None:
    found, version = benchmark.pedantic(rows, rounds=1, iterations=1)
    machine = f"{platform.system()}-{platform.machine()}"
    result = {
        "question": "import",
        "machine": {"name": machine, "python": platform.python_version()},
        "versions": {"torch": version},
        "rounds": ROUNDS,
        "rows": found,
    }
    benchmark.extra_info["rows"] = found
    path = Path(__file__).parent / "results" / f"import-{machine}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    for row in found:
        print(f"{row['case']}: {row['ours']} ms of {BOUND_MS:.0f}")
    assert len(found) == len(PARTS)
