"""A small training job with faults where a plan says, and plain PyTorch over the same samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from pt214_elastic import deal
from pt214_elastic.events import Event
from pt214_elastic.launch import Launcher
from torch import nn

TRAIN = Path(__file__).parent / "scripts" / "train.py"
Values = list[list[float]]


def train_job(
    folder: Path,
    nproc: int,
    steps: int,
    faults: Sequence[Sequence[object]],
    wait_after: Sequence[int] = (),
    min_ranks: int = 1,
    **env: str,
) -> tuple[int, list[Event]]:
    """Run ``scripts/train.py``; the return code, and the events up to the end."""
    events: list[Event] = []
    plan = {
        "STEPS": str(steps),
        "FAULTS": json.dumps(faults),
        "WAIT_AFTER": json.dumps(wait_after),
        "MIN_RANKS": str(min_ranks),
        "OMP_NUM_THREADS": "1",
    }
    job = Launcher(
        [sys.executable, str(TRAIN)],
        nproc=nproc,
        max_restarts=10,
        env={**plan, **env},
        log_dir=folder,
        on_event=events.append,
        events_path=folder / "events.jsonl",
    )
    code = job.run()
    assert any(event.data.get("name") == "final" for event in events), (
        code,
        [(path.name, path.read_text()[-2000:]) for path in sorted(folder.glob("*.err"))],
    )
    return code, events


def train_plainly(steps: int, spoilt: dict[int, float] | None = None) -> Values:
    """Plain PyTorch in one process over the same samples; ``spoilt`` steps are divided."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(50, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    for step in range(steps):
        rows = deal.samples_of(step, 50, 10, seed=0)
        loss: torch.Tensor = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        (loss / (spoilt or {}).get(step, 1.0)).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


@pytest.fixture(scope="session")
def job_of() -> Callable[..., tuple[int, list[Event]]]:
    """:func:`train_job`."""
    return train_job


@pytest.fixture(scope="session")
def plainly() -> Callable[..., Values]:
    """:func:`train_plainly`."""
    return train_plainly
