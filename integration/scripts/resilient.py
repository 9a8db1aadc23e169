"""Functions for a fault-tolerant job, as a script for a GPU cluster defines them.

``import resilient`` after ``pt214.enable()``; the test below calls them.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load_state_dict, save_state_dict


def init_group() -> None:
    """Join the job that the launcher describes in the environment."""
    dist.init_process_group(
        backend="nccl",
        init_method="env://",
        device_id=torch.device(f"cuda:{os.environ['LOCAL_RANK']}"),
    )
    dist.set_option("on_fault", "rejoin")


def save(epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """Begin an asynchronous checkpoint."""
    state: dict[str, Any] = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    save_state_dict(state, path=path)
    print(f"rank {dist.get_rank()}: saved epoch {epoch}")


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> int:
    """Fill model and optimizer from ``path``; the epoch it holds."""
    state: dict[str, Any] = {
        "epoch": -1,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    load_state_dict(state, path=path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epoch"])
