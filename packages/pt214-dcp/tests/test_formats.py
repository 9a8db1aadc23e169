"""State dicts that nobody here wrote, through every format."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def vision(name: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        torchvision: Any = importlib.import_module("torchvision")

        return {"model": getattr(torchvision.models, name)(num_classes=3).state_dict()}

    return make


def language(name: str, **config: Any) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        transformers: Any = importlib.import_module("transformers")

        found = getattr(transformers, f"{name}Config")(**config)
        kind = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bert": "BertModel",
                "T5": "T5ForConditionalGeneration"}[name]  # fmt: skip
        return {"model": getattr(transformers, kind)(found).state_dict()}

    return make


def trained(name: str) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        params = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]
        optimizer = getattr(torch.optim, name)(params, lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "rng": torch.get_rng_state(),
        }

    return make


FOREIGN: dict[str, tuple[str | None, Callable[[], dict[str, Any]]]] = {
    "torchvision shufflenet_v2_x0_5": ("torchvision", vision("shufflenet_v2_x0_5")),
    "torchvision mobilenet_v3_small": ("torchvision", vision("mobilenet_v3_small")),
    "torchvision squeezenet1_1": ("torchvision", vision("squeezenet1_1")),
    "transformers GPT2 (tied head)": (
        "transformers", language("GPT2", n_embd=32, n_layer=2, n_head=2, vocab_size=100)),
    "transformers Llama": ("transformers", language(
        "Llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=100,
        intermediate_size=64)),
    "transformers Bert": ("transformers", language(
        "Bert", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=100,
        intermediate_size=64)),
    "transformers T5 (tied embeddings)": ("transformers", language(
        "T5", d_model=32, num_layers=1, num_heads=2, vocab_size=100, d_ff=64, d_kv=16)),
    "nn.Transformer": (None, lambda: {"model": nn.Transformer(16, 2, 1, 1, 32).state_dict()}),
    "nn.LSTM": (None, lambda: {"model": nn.LSTM(4, 8, 2).state_dict()}),
    "bfloat16": (None, lambda: {"model": nn.Linear(3, 4).bfloat16().state_dict()}),
    **{f"optim.{name}": (None, trained(name))
       for name in ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop",
                    "Adamax", "Rprop", "ASGD", "Adafactor", "Muon")},
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Equal bits; numbers as keys of a dict may have become texts, as stock has it."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        mine = {str(key): item for key, item in a.items() if not _blank(item)}
        theirs = {str(key): item for key, item in b.items() if not _blank(item)}
        return mine.keys() == theirs.keys() and all(
            same(item, theirs[key]) for key, item in mine.items()
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def _blank(item: Any) -> bool:
    return isinstance(item, dict) and not item  # stock leaves such dicts out


def through_all(state: dict[str, Any], folder: Path) -> list[str]:
    """Steps that lost something; each reads what the one before has written."""
    torch.save(state, folder / "a.pt")
    pt214_dcp.convert(folder / "a.pt", folder / "own")
    well = {"torch to own": same(state, pt214_dcp.read(folder / "own"))}
    pt214_dcp.verify(folder / "own")
    pt214_dcp.convert(folder / "own", folder / "stock", to="stock")
    pt214_dcp.convert(folder / "stock", folder / "back")
    well["own to stock to own"] = same(state, pt214_dcp.read(folder / "back"))
    pt214_dcp.save({"model": state["model"]}, folder / "model")
    pt214_dcp.convert(folder / "model", folder / "hf", to="safetensors")
    pt214_dcp.convert(folder / "hf", folder / "b.pt", to="torch")
    flat = torch.load(folder / "b.pt", weights_only=True)
    well["own to safetensors to torch"] = same(state["model"], flat)
    return [step for step, fine in well.items() if not fine]


def test_foreign_state_comes_through_every_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome: dict[str, str] = {}
    for number, (name, (package, make)) in enumerate(FOREIGN.items()):
        if package is not None and importlib.util.find_spec(package) is None:
            outcome[name] = f"not run: {package} is not installed"
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of foreign packages
            state = make()
        failed = through_all(state, folder)
        outcome[name] = f"failed: {failed}" if failed else "passed"
    with capsys.disabled():
        lines = [f"  {told:8} {name}" for name, told in outcome.items()]
        print("\n".join(["", f"foreign state, {len(outcome)} in all:", *lines]))  # noqa: T201
    assert [name for name, told in outcome.items() if told.startswith("failed")] == []
    assert list(outcome.values()).count("passed") >= 16


def test_same_notices_a_change() -> None:
    assert not same({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    assert not same({"w": torch.ones(2)}, {"w": torch.ones(2).double()})
    assert not same({"n": 1}, {"n": 2})
    assert not same({"n": 1}, {"n": 1, "m": 1})
    assert not same([1], [1, 2])
