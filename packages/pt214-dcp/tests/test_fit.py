"""What does not fit is listed in one error, whatever its kind, before a byte is written."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    inner = {"d": torch.ones(2)}
    state = {"a": torch.ones(2, 3), "b": 1, "c": inner, "e": [1, 2], "f": torch.ones(4)}
    pt214_dcp.save(state, tmp_path)
    return tmp_path


def test_all_kinds_of_difference_are_in_one_error(saved: Path) -> None:
    narrow = torch.zeros(2, 1).expand(2, 3)
    wanted: dict[str, Any] = {
        "a": narrow, "b": torch.zeros(1), "c": 3, "e": {"x": 1}, "f": torch.zeros(5).int(), "g": 1,
    }  # fmt: skip
    with pytest.raises(pt214_dcp.StateMismatch) as caught:
        pt214_dcp.load(wanted, saved)
    told = {line.split(":")[0]: line for line in caught.value.different}
    assert "expanded tensor (strides (1, 0))" in told["a"]
    assert told["b"] == "b: checkpoint has a value, state dict has a tensor"
    assert "checkpoint has a list, state dict has a dict" in told["e/"]
    assert "shape (4,)" in str(caught.value)
    assert "dtype torch.float32, state dict has torch.int32" in str(caught.value)
    assert "c" in caught.value.missing
    assert "g" in caught.value.missing
    assert not narrow.any()
    assert wanted["b"].tolist() == [0]


def test_an_expanded_tensor_is_saved_whole_and_loads_into_its_clone(tmp_path: Path) -> None:
    pt214_dcp.save({"a": torch.ones(2, 1).expand(2, 3)}, tmp_path)
    found = {"a": torch.zeros(2, 3)}
    pt214_dcp.load(found, tmp_path)
    assert found["a"].tolist() == [[1.0] * 3] * 2


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_an_optimizer_that_numbers_its_state_comes_back(tmp_path: Path) -> None:
    _, optimizer = trained()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1]
    pt214_dcp.save(saved, tmp_path)
    whole = pt214_dcp.read(tmp_path)
    assert list(whole["state"]) == [0, 1]
    assert whole["param_groups"][0]["params"] == [0, 1]
    blank = copy.deepcopy(saved)
    for slots in blank["state"].values():
        for tensor in slots.values():
            tensor.zero_()
    pt214_dcp.load(blank, tmp_path)
    for number, slots in saved["state"].items():
        for name, tensor in slots.items():
            assert torch.equal(blank["state"][number][name], tensor)
            assert torch.equal(whole["state"][number][name], tensor)


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_a_new_optimizer_is_told_how_to_resume_and_both_ways_are_exact(tmp_path: Path) -> None:
    model, optimizer = trained()
    rng = torch.get_rng_state()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    pt214_dcp.save(saved, tmp_path / "torch")
    pt214_dcp.save({"o": get_optimizer_state_dict(model, optimizer)}, tmp_path / "dcp")
    wanted = one_step(model, optimizer)

    twin, new = fresh()
    blank = {"model": twin.state_dict(), "optimizer": new.state_dict()}
    with pytest.raises(pt214_dcp.StateMismatch, match=r"pt214_dcp\.read\(path\), and give it"):
        pt214_dcp.load(blank, tmp_path / "torch")
    found = pt214_dcp.read(tmp_path / "torch")
    twin.load_state_dict(found["model"])
    new.load_state_dict(found["optimizer"])
    torch.set_rng_state(rng)
    assert all(map(torch.equal, one_step(twin, new), wanted))

    twin, new = fresh()
    filled = {"o": get_optimizer_state_dict(twin, new)}
    pt214_dcp.load(filled, tmp_path / "dcp")
    twin.load_state_dict(found["model"])
    set_optimizer_state_dict(twin, new, filled["o"])
    torch.set_rng_state(rng)
    assert all(map(torch.equal, one_step(twin, new), wanted))


def test_a_mismatch_without_an_optimizer_has_no_such_hint(saved: Path) -> None:
    with pytest.raises(pt214_dcp.StateMismatch) as caught:
        pt214_dcp.load({"a": torch.zeros(2, 3)}, saved)
    assert "optimizer" not in str(caught.value)


def test_a_number_and_its_text_are_two_keys(tmp_path: Path) -> None:
    pt214_dcp.save({0: torch.ones(1), "0": torch.full((1,), 2.0)}, tmp_path)
    found = {0: torch.zeros(1), "0": torch.zeros(1)}
    pt214_dcp.load(found, tmp_path)
    assert (found[0].item(), found["0"].item()) == (1, 2)
    pt214_dcp.save({0: torch.ones(1)}, tmp_path)
    with pytest.raises(pt214_dcp.StateMismatch) as caught:
        pt214_dcp.load({"0": torch.zeros(1)}, tmp_path)
    assert caught.value.missing == ("0",)
    assert caught.value.unexpected == ("[0]",)
