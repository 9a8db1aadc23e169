"""Two checkpoints that differ anywhere are told to differ, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pt214_dcp
import pytest
import torch
from pt214_dcp import contents
from pt214_dcp.__main__ import main
from pt214_dcp.checkpoint import open_checkpoint

PerRank = pt214_dcp.PerRank


def base() -> dict[str, Any]:
    own = {"seed": 3, "rng": torch.arange(4), "none": torch.zeros(0), "more": [torch.ones(2)]}
    return {
        "w": torch.arange(6.0), "deep": {"lr": 0.1, "pair": (1, 2)}, "empty": {},
        "own": PerRank(own), "second": PerRank(torch.ones(3)),
    }  # fmt: skip


def own_of(state: dict[str, Any]) -> Any:
    return state["own"].value


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "w": lambda s: s["w"].__setitem__(5, 9),
    "deep/lr": lambda s: s["deep"].update(lr=0.2),
    "deep/pair/": lambda s: s["deep"].update(pair=[1, 2]),
    "empty": lambda s: s.update(empty=[]),
    "own/seed (rank 0)": lambda s: own_of(s).update(seed=4),
    "own/rng (rank 0)": lambda s: own_of(s)["rng"].__setitem__(0, 9),
    "own/more/[0] (rank 0)": lambda s: own_of(s)["more"][0].__setitem__(1, 9),
    "own/none (rank 0)": lambda s: own_of(s).update(none=torch.zeros(0, 2)),
    "second (rank 0)": lambda s: s["second"].value.__setitem__(2, 9),
}


def differences(folder: Path, change: Callable[[dict[str, Any]], None], capsys: Any) -> list[str]:
    changed = base()
    change(changed)
    pt214_dcp.save(base(), folder / "a")
    pt214_dcp.save(changed, folder / "b")
    status = main(["diff", str(folder / "a"), str(folder / "b"), "--json"])
    lines = json.loads(capsys.readouterr().out)["differences"]
    assert status == bool(lines)
    return [str(line) for line in lines]


@pytest.mark.parametrize("name", CHANGES)
def test_each_change_is_the_one_difference_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    told = differences(tmp_path, CHANGES[name], capsys)
    assert told
    assert all(line.startswith(name) for line in told)


def test_equal_states_have_no_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert differences(tmp_path, lambda _: None, capsys) == []


def test_an_array_and_a_tensor_of_equal_values_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = differences(tmp_path, lambda s: s.update(w=np.arange(6, dtype=np.float32)), capsys)
    assert told == [
        "w: A tensor of torch.float32 and (6,), B numpy of torch.float32 and (6,)"
    ]  # fmt: skip


def test_a_list_that_leaves_out_what_ranks_own_fails_the_tests_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contents, "_add_own", lambda *_: None)
    assert differences(tmp_path, CHANGES["own/rng (rank 0)"], capsys) == []


def stage(rank: int, path: Path, changed: bool) -> None:
    state = {"w": torch.full((3,), float(rank)), "n": rank, "common": 1}
    state["own"] = PerRank(torch.full((2,), float(rank)))
    if rank and changed:
        state |= {"w": torch.full((3,), 9.0), "n": 9, "own": PerRank(torch.full((2,), 8.0))}
    pt214_dcp.save(state, path, key_group=f"stage {rank}")


def test_every_key_group_and_rank_is_compared(
    tmp_path: Path, run_ranks: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, stage, tmp_path / "a", False)
    run_ranks(2, stage, tmp_path / "b", True)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in facts["tensors"]] == ["w (key group 1)", "own (rank 1)"]
    assert [row["max_absolute"] for row in facts["tensors"]] == [8, 7]
    assert facts["differences"][0] == "n (key group 1): 1 in A, 9 in B"
    held = contents.contents(open_checkpoint(tmp_path / "a")).tensors
    assert held["w (key group 1)"].read().tolist() == [1.0] * 3
