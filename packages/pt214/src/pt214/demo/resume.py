"""One resuming rank: load the last checkpoint on another number of ranks, and evaluate it."""

from __future__ import annotations

import sys
from pathlib import Path

import pt214_dcp
import pt214_elastic
from torch.distributed.checkpoint.state_dict import set_state_dict

from pt214.demo.model import evaluate
from pt214.demo.options import Plan
from pt214.demo.rank import build, state_of

__all__ = ["resume"]


def resume(plan: Plan, path: Path) -> None:
    """Fill model and optimizer from ``path`` and tell the launcher the held-out loss."""
    rank = build(plan)
    el = pt214_elastic.init(min_ranks=1, on_fault="raise")
    state = {"step": 0, **state_of(rank)}
    pt214_dcp.load(state, path)
    set_state_dict(
        rank.model,
        rank.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    el.emit("resumed", step=state["step"], held_out_loss=evaluate(rank.model, *rank.held_out))


if __name__ == "__main__":
    resume(Plan.read(Path(sys.argv[1])), Path(sys.argv[2]))
