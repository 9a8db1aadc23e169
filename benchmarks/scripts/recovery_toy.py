"""What both rivals of bench_elastic_recovery train, and how they note kills and steps."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

FOLDER = Path(os.environ["BENCH_FOLDER"])
STEPS = int(os.environ["BENCH_STEPS"])
KILL_AT = json.loads(os.environ["BENCH_KILL_AT"])  # steps in which rank 1 kills itself, once each
WORK_S = 0.02  # data loading and a larger model, both played by sleep
_log = os.open(FOLDER / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                         nn.Linear(256, 8))  # fmt: skip


def note(what: str, step: int, world: int) -> None:
    row = {"what": what, "step": step, "world": world, "pid": os.getpid(), "at": time.monotonic()}
    os.write(_log, json.dumps(row).encode() + b"\n")


def loss_of(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    time.sleep(WORK_S)
    generator = torch.Generator().manual_seed(step * 64 + rank)
    loss: torch.Tensor = net(torch.randn(32, 64, generator=generator)).square().mean()
    return loss


def kill_in(step: int, rank: int, world: int) -> None:
    """Between forward and backward, so that the others wait in the all-reduce."""
    done = FOLDER / f"killed-{step}"
    if rank == 1 and step in KILL_AT and not done.exists():
        done.touch()
        note("kill", step, world)
        os.kill(os.getpid(), signal.SIGKILL)
