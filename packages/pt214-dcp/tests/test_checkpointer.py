"""When to save, what to keep, where to resume; and the article's two names."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import files


def test_saves_at_its_steps_keeps_the_last_and_restores_the_newest(tmp_path: Path) -> None:
    keeper = pt214_dcp.Checkpointer(tmp_path / "c", every=2, keep=2)
    assert (keeper.steps(), keeper.latest()) == ([], None)
    with pytest.raises(pt214_dcp.NotACheckpoint, match="no committed checkpoint"):
        keeper.restore({"w": torch.zeros(3)})
    for step in range(1, 9):
        handle = keeper.save(step, {"w": torch.full((3,), float(step))})
        assert (handle is not None) == (step % 2 == 0)
    keeper.wait()
    assert (keeper.steps(), keeper.latest()) == ([6, 8], 8)
    state = {"w": torch.zeros(3)}
    assert pt214_dcp.Checkpointer(tmp_path / "c").restore(state) == 8
    assert state["w"].tolist() == [8.0] * 3


def test_every_s_saves_when_the_time_has_come(tmp_path: Path) -> None:
    rare = pt214_dcp.Checkpointer(tmp_path / "a", every_s=1e6)
    assert rare.save(1, {"n": 1}) is None
    assert rare.save(1, {"n": 1}, force=True) is not None
    often = pt214_dcp.Checkpointer(tmp_path / "b", every_s=1e-9)
    assert often.save(1, {"n": 1}) is not None
    rare.wait()
    often.wait()


def test_latest_and_retention_move_only_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = pt214_dcp.Checkpointer(tmp_path, keep=1)
    keeper.save(1, {"n": 1})
    keeper.wait()
    gate, write = threading.Event(), files.write_new

    def held(path: Path, data: Any, check: Callable[[], None]) -> None:
        assert gate.wait(60)
        write(path, data, check)

    monkeypatch.setattr(files, "write_new", held)
    keeper.save(2, {"n": 2})
    assert (keeper.latest(), Path(str(keeper.path(1))).exists()) == (1, True)
    gate.set()
    keeper.wait()
    assert (keeper.steps(), Path(str(keeper.path(1))).exists()) == ([2], False)


def test_an_earlier_error_is_raised_by_the_next_save_and_then_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*rest: object) -> None:
        raise OSError(5, "Input/output error")

    keeper = pt214_dcp.Checkpointer(tmp_path / "two")
    calls: list[Callable[[], pt214_dcp.SaveHandle | None]] = [
        lambda: pt214_dcp.save_state_dict({"n": 1}, path=tmp_path / "one"),
        lambda: keeper.save(1, {"n": 1}, force=True),
    ]
    for save in calls:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_new", refuse)
            handle = save()
            assert handle is not None
            while not handle.done():
                threading.Event().wait(0.001)
        with pytest.raises(pt214_dcp.SaveFailed, match="Input/output error"):
            save()
        again = save()
        assert again is not None
        again.wait()


def test_the_articles_names_save_and_load(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    pt214_dcp.save_state_dict(state, path=tmp_path)
    blank = torch.nn.Linear(2, 2).state_dict()
    other = {"epoch": 0, "model": blank, "optimizer": optimizer.state_dict()}
    pt214_dcp.load_state_dict(other, path=tmp_path)
    assert other["epoch"] == 3
    assert all(torch.equal(blank[key], value) for key, value in model.state_dict().items())


def test_the_end_of_the_program_waits_for_the_save(tmp_path: Path) -> None:
    code = (
        "import torch, pt214_dcp, sys\n"
        "pt214_dcp.save_state_dict({'w': torch.ones(5_000_000)}, path=sys.argv[1])"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)
    pt214_dcp.verify(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("every", 0, "a whole number above 0"),
        ("every", True, "a whole number above 0"),
        ("every", 2.0, "a whole number above 0"),
        ("keep", 0, "a whole number above 0"),
        ("keep", 2.5, "a whole number above 0"),
        ("full_every", -1, "a whole number above 0"),
        ("every_s", 0, "a number above 0"),
        ("every_s", "1", "a number above 0"),
        ("timeout_s", 0, "above 0 seconds"),
        ("progress", 3, "True, False or a function"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tmp_path: Path, name: str, value: Any, words: str
) -> None:
    with pytest.raises(pt214_dcp.BadOption, match=rf"{name} is {value!r}; it must be {words}"):
        pt214_dcp.Checkpointer(tmp_path, **{name: value})


@pytest.mark.parametrize("step", [-1, 1.5, True])
def test_a_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match=f"step is {step}; it must be a whole number, 0 or more"):
        pt214_dcp.Checkpointer(tmp_path).save(step, {})
