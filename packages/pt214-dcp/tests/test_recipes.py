"""Each recipe of the documentation, run as it stands there, where its library is installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp.compat import local_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard

PAGE = Path(__file__).parents[3] / "docs" / "dcp-recipes.md"
BLOCK = re.compile(r"```python\n# recipe: (\w+)\n(.*?)```", re.DOTALL)

pytestmark = [
    pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside this package"),
    pytest.mark.filterwarnings("ignore"),  # of foreign packages
]


def recipe(name: str) -> dict[str, Any]:
    blocks = dict(BLOCK.findall(PAGE.read_text()))
    found: dict[str, Any] = {"__name__": f"recipe_{name}"}
    exec(compile(blocks[name], f"{PAGE}:{name}", "exec"), found)
    return found


def library(name: str) -> Any:
    """The library, or a skip that names it."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


def test_every_recipe_is_run_here() -> None:
    names = {name for name, _ in BLOCK.findall(PAGE.read_text())}
    assert names == {"fsdp2", "stock", "lightning", "accelerate", "torchtitan"}
    assert PAGE.read_text().count("```python") == len(names)


def fsdp2(rank: int, folder: str) -> None:
    use = recipe("fsdp2")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    fully_shard(model)
    optimizer = trained(model)
    kept = local_tensor(model.weight).clone()
    use["save"](model, optimizer, 5, folder).wait()
    with torch.no_grad():
        local_tensor(model.weight).zero_()
    assert use["load"](model, optimizer, folder) == 5
    assert torch.equal(local_tensor(model.weight), kept)


def test_fsdp2(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(2, fsdp2, str(tmp_path / "a"))


def test_stock(tmp_path: Path) -> None:
    use = recipe("stock")
    use["save"]({"w": torch.ones(2)}, tmp_path)
    found = {"w": torch.zeros(2)}
    use["load"](found, tmp_path)
    assert torch.equal(found["w"], torch.ones(2))
    pt214_dcp.verify(tmp_path)


def test_lightning(tmp_path: Path) -> None:
    lightning = library("lightning")
    use = recipe("lightning")

    base: Any = lightning.LightningModule

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            found: torch.Tensor = self.layer(batch).square().mean()
            return found

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    def trainer(epochs: int) -> Any:
        return lightning.Trainer(
            max_epochs=epochs, plugins=[use["Pt214IO"]()], accelerator="cpu", devices=1,
            default_root_dir=tmp_path, logger=False, enable_progress_bar=False,
            enable_model_summary=False,
        )  # fmt: skip

    data: Any = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)  # type: ignore[arg-type]
    first, module = trainer(1), Module()
    first.fit(module, data)
    first.save_checkpoint(tmp_path / "a")
    pt214_dcp.verify(tmp_path / "a")
    second, again = trainer(2), Module()
    second.fit(again, data, ckpt_path=str(tmp_path / "a"))
    assert second.current_epoch == 2
    assert second.global_step == 4
    third, same = trainer(1), Module()  # all is done at this epoch: only the weights are loaded
    third.fit(same, data, ckpt_path=str(tmp_path / "a"))
    assert torch.equal(same.layer.weight, module.layer.weight)
    assert not torch.equal(again.layer.weight, module.layer.weight)


def test_accelerate(tmp_path: Path) -> None:
    accelerate = library("accelerate")
    use = recipe("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    plain = nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    kept = plain.weight.detach().clone()
    use["save"](accelerator, model, optimizer, 3, tmp_path)
    with torch.no_grad():
        plain.weight.zero_()
    assert use["load"](accelerator, model, optimizer, tmp_path) == 3
    assert torch.equal(plain.weight, kept)


class Container:
    """What torchtitan calls an optimizers container, as far as a checkpoint sees it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return {f"moment.{n}": value["exp_avg"] for n, value in self._state().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for n, value in self._state().items():
            value["exp_avg"].copy_(state[f"moment.{n}"])

    def _state(self) -> dict[int, Any]:
        found: dict[int, Any] = dict(enumerate(self.optimizer.state.values()))
        return found


class Step:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def titan(rank: int, folder: str, mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use = recipe("torchtitan")
    model = nn.Linear(4, 1)
    optimizer, train = trained(model), Step()
    manager = use["Pt214Manager"].Config(
        enable=True, interval=1, folder="checkpoints", async_mode=mode
    ).build(
        dataloader=None, model_parts=[model], optimizers=Container(optimizer),
        lr_schedulers=Step(), states={"train_state": train}, sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    train.step = 4
    assert manager.save(4)
    manager.maybe_wait_for_saving()
    kept = model.weight.detach().clone()
    moment = next(iter(optimizer.state.values()))["exp_avg"]
    old = moment.clone()
    with torch.no_grad():
        model.weight.zero_()
        moment.zero_()
    train.step = 0
    assert (Path(folder) / "checkpoints" / "step-4" / "COMMIT.json").exists()
    assert manager.load()
    assert torch.equal(model.weight, kept)
    assert torch.equal(moment, old)
    assert train.step == 4
    manager.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan(run_ranks: Callable[..., None], tmp_path: Path, mode: str) -> None:
    library("torchtitan")
    run_ranks(1, titan, str(tmp_path), mode)
