"""Recovery after SIGKILL of one of four ranks: ours beside torchrun's restart, in one run.

Both train the same toy (``scripts/recovery_toy.py``, some 20 ms a step) on gloo and the CPU. Rank 1
kills itself between forward and backward, ``FAULTS`` times. Two times are taken for each fault:

    next step    from the kill until every rank of the new world has applied the interrupted step
    full world   from the kill until four ranks have applied a step together

After torchrun's restart these are one and the same; ours goes on with three ranks meanwhile. The
clock is ``time.monotonic()``, the same for all processes of a host. Numbers are medians in seconds.

torchrun gets a checkpoint after every step, from a local disk, and the environment variable
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: without it its restarts fail with gloo in torch 2.14.1,
since restarted workers read the addresses of dead ones from the agent's store.

Run with ``pytest benchmarks/bench_elastic_recovery.py``; it writes
``benchmarks/results/elastic_recovery-<machine>.json``.
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
import torch

RANKS = 4
FAULTS = 3
STEPS_BETWEEN = 20
KILL_AT = [STEPS_BETWEEN * (number + 1) for number in range(FAULTS)]
STEPS = KILL_AT[-1] + STEPS_BETWEEN
LIMIT_S = 190
SCRIPTS = Path(__file__).parent / "scripts"
COMMANDS = {
    "ours": [
        "pt214_elastic", "run", "--nproc-per-node", str(RANKS), "--max-restarts", str(FAULTS),
        str(SCRIPTS / "recovery_ours.py"),
    ],
    "torchrun": [
        "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
        "--max-restarts", str(FAULTS), str(SCRIPTS / "recovery_torchrun.py"),
    ],
}  # fmt: skip
Row = dict[str, Any]


def train(name: str, folder: Path) -> list[Row]:
    """Everything that the ranks of one job noted, in order of time."""
    folder.mkdir()
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "BENCH_FOLDER": str(folder),
        "BENCH_STEPS": str(STEPS),
        "BENCH_KILL_AT": json.dumps(KILL_AT),
    }
    log = folder / "log"
    with log.open("wb") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", *COMMANDS[name]],
            env=env, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        assert job.wait(LIMIT_S) == 0, log.read_text()[-4000:]
    finally:
        if job.poll() is None:  # too slow: its launcher ends its ranks
            job.terminate()
            job.wait()
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(map(json.loads, lines), key=lambda row: float(row["at"]))


def recoveries(rows: list[Row], world: int | None = None) -> list[float]:
    """For each kill: seconds until all ranks of a world applied one step from that one on.

    Args:
        rows: what the ranks noted.
        world: size of that world; ``None`` for whatever it is.
    """
    found = []
    for kill in (row for row in rows if row["what"] == "kill"):
        ranks: dict[int, set[int]] = {}
        for row in rows:
            later = row["what"] == "commit" and row["at"] > kill["at"]
            if later and row["step"] >= kill["step"] and world in (None, row["world"]):
                ranks.setdefault(row["step"], set()).add(row["pid"])
                if len(ranks[row["step"]]) == row["world"]:
                    found.append(row["at"] - kill["at"])
                    break
    assert len(found) == FAULTS
    return found


def compare(folder: Path) -> list[Row]:
    rows = {name: train(name, folder / name) for name in COMMANDS}
    result = []
    for case, world in (("next step", None), ("full world", RANKS)):
        each = {name: recoveries(noted, world) for name, noted in rows.items()}
        ours, rival = (statistics.median(each[name]) for name in ("ours", "torchrun"))
        result.append({
            "case": case, "unit": "s", "ours": ours, "rival": rival, "rival_name": "torchrun",
            "ratio": rival / ours, "ours_each": each["ours"], "rival_each": each["torchrun"],
        })  # fmt: skip
    return result


def report(found: list[Row], load: float) -> Path:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {"device": "cpu", "backend": "gloo", "cores": cores, "ranks": RANKS}
    result = {
        "question": "elastic_recovery",
        "machine": {**machine, "python": platform.python_version(), "load": load},
        "versions": {"torch": torch.__version__},
        "faults": FAULTS,
        "rows": found,
    }
    place = Path(__file__).parent / "results" / f"elastic_recovery-cpu-gloo-{cores}-cores.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(result, indent=1) + "\n")
    return place


def test_recovery(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = round(os.getloadavg()[0], 1)  # of other work: restarts are bound by the CPU
    found: list[Row] = benchmark.pedantic(lambda: compare(tmp_path), rounds=1)
    benchmark.extra_info["rows"] = found
    report(found, load)
    with capsys.disabled():
        for row in found:
            print(
                f"\n{row['case']}: ours {row['ours']:.3f} s, torchrun {row['rival']:.2f} s,"
                f" ratio {row['ratio']:.0f}"
            )
