"""State that nobody here wrote: torch's own layers and every optimizer of torch.optim."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from torch import nn

LAYERS: dict[str, Any] = {
    "Transformer": lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
    "LSTM": lambda: nn.LSTM(4, 8, num_layers=2, bidirectional=True),
    "GRU": lambda: nn.GRU(4, 8),
    "RNN": lambda: nn.RNN(4, 8),
    "MultiheadAttention": lambda: nn.MultiheadAttention(8, 2),
    "Conv1d": lambda: nn.Conv1d(3, 4, 3),
    "Conv2d": lambda: nn.Conv2d(3, 4, 3, groups=1),
    "ConvTranspose3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "LayerNorm": lambda: nn.LayerNorm((3, 4)),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "Embedding": lambda: nn.Embedding(10, 3, padding_idx=0),
    "EmbeddingBag": lambda: nn.EmbeddingBag(10, 3),
    "Bilinear": lambda: nn.Bilinear(2, 3, 4),
    "PReLU": lambda: nn.PReLU(3),
    "AdaptiveLogSoftmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(64, 20, [5, 10]),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "bfloat16": lambda: nn.Linear(3, 4).bfloat16(),
}
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(emptied(item) for item in value)
    return 0


def trained(name: str) -> dict[str, Any]:
    """A model and its optimizer after two steps."""
    kind = getattr(torch.optim, name)
    model = nn.Embedding(6, 4, sparse=True) if name == "SparseAdam" else nn.Linear(4, 4, bias=False)
    optimizer = kind(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.tensor([1, 2]) if name == "SparseAdam" else torch.randn(2, 4)

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            value: torch.Tensor = model(x).square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        optimizer.step(loss)
    return {"epoch": 2, "model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_state_of_every_layer_and_optimizer_comes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = {f"nn.{name}": {"model": make().state_dict()} for name, make in LAYERS.items()}
    states |= {f"optim.{name}": trained(name) for name in OPTIMIZERS}
    outcome = {}
    for name, state in states.items():
        blank = emptied(state)
        pt214_dcp.save(state, tmp_path / name)
        pt214_dcp.load(blank, tmp_path / name)
        outcome[name] = same(blank, {**state})
    with capsys.disabled():
        failed = [name for name, well in outcome.items() if not well]
        print(f"\nforeign state: {len(outcome) - len(failed)} of {len(outcome)} passed; {failed=}")  # noqa: T201
    assert len(OPTIMIZERS) >= 13
    assert failed == []
