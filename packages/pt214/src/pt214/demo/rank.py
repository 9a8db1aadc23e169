"""What training and resuming ranks share: the model, its optimizer, the held-out windows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import default_collate

from pt214.demo.model import GPT, loss_of
from pt214.demo.options import Plan
from pt214.demo.text import CONTEXT, Windows, read
from pt214.parts import part

__all__ = ["Rank", "build", "compile_blocks", "state_of"]

SEED = 214
EVALUATED = 16  # held-out windows


@dataclass(frozen=True, slots=True)
class Rank:
    """One process's model and data."""

    model: GPT
    optimizer: torch.optim.Optimizer
    train: Windows
    held_out: tuple[torch.Tensor, torch.Tensor]


def build(plan: Plan) -> Rank:
    """Model, optimizer and windows on the plan's device; the same weights in every process."""
    torch.manual_seed(SEED)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.ranks))
    model = GPT(_norm()).to(plan.device)
    train, rest = read(Path(plan.text))
    stride = max(1, len(rest) // EVALUATED)
    x, y = default_collate([rest[i] for i in range(0, len(rest), stride)][:EVALUATED])
    held_out = (x.to(plan.device), y.to(plan.device))
    return Rank(model, torch.optim.AdamW(model.parameters(), lr=2e-3), train, held_out)


def _norm() -> type[nn.Module]:
    """pt214-mps' RMSNorm where it is installed: a Metal kernel on MPS, plain torch elsewhere."""
    if not part("mps").installed:
        return nn.RMSNorm
    from pt214_mps.nn import RMSNorm

    found: type[nn.Module] = RMSNorm
    return found


def compile_blocks(plan: Plan, rank: Rank) -> None:
    """Compile each block with pt214's backend, and run them once so that no step waits for it.

    The first process fills the cache on disk; the others wait for it, then read it side by side.
    """
    for block in rank.model.blocks:
        block.compile(backend="pt214", dynamic=True)
    filled = Path(plan.cache) / "filled"
    with FileLock(Path(plan.cache) / "lock"):
        if not filled.exists():
            _run_once(plan, rank)
            filled.touch()
            return
    _run_once(plan, rank)


def _run_once(plan: Plan, rank: Rank) -> None:
    x = torch.zeros(2, CONTEXT, dtype=torch.long, device=plan.device)
    torch.autograd.backward(loss_of(rank.model(x), x))
    rank.optimizer.zero_grad()


def state_of(rank: Rank) -> dict[str, Any]:
    """Model and optimizer state by parameter name; a fresh optimizer's state is made first."""
    model, optimizer = get_state_dict(rank.model, rank.optimizer)
    return {"model": model, "optimizer": optimizer}
