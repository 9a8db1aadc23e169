"""Retention: what is kept stays whole, and a kill midway leaves no damaged checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp.__main__ import main
from pt214_dcp.retention import remove_checkpoint
from pt214_dcp.root import COMMIT

Remove = Callable[[Path], None]
ROWS = 1 << 20  # of 4 bytes: several blocks, so that some are linked and some are written


def state_of(step: int) -> dict[str, Any]:
    """One tensor never changes, so each step's save links it from the step before."""
    return {"frozen": torch.arange(ROWS), "w": torch.full((ROWS,), step), "step": step}


def inodes_of(checkpoints: pt214_dcp.Checkpointer, step: int) -> set[int]:
    return {file.stat().st_ino for file in Path(str(checkpoints.path(step))).glob("gen-*/*")}


def prune_and_look(folder: Path) -> None:
    """Save linked steps, prune, and hold what is kept against what was saved."""
    checkpoints = pt214_dcp.Checkpointer(folder, keep=None, full_every=10)
    for step in range(5):
        checkpoints.save(step, state_of(step))
        checkpoints.wait()
    assert inodes_of(checkpoints, 0) & inodes_of(checkpoints, 4)
    assert main(["prune", str(folder), "--keep", "2", "--json"]) == 0
    assert checkpoints.steps() == [3, 4]
    for step in checkpoints.steps():
        pt214_dcp.verify(checkpoints.path(step))
        found: dict[str, Any] = {"step": 0}
        found |= {key: torch.zeros(ROWS, dtype=torch.int64) for key in ("frozen", "w")}
        pt214_dcp.load(found, checkpoints.path(step))
        for key, value in state_of(step).items():
            assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), key


def test_prune_keeps_every_bit_that_a_kept_step_shares_with_a_removed_one(tmp_path: Path) -> None:
    prune_and_look(tmp_path)


def empty_first(path: Path) -> None:
    """A prune that frees the bytes of files that others hold, too."""
    for file in path.glob("gen-*/*"):
        os.truncate(file, 0)
    remove_checkpoint(path)


def neighbour(path: Path) -> None:
    """A prune that removes a step that is kept."""
    shutil.rmtree(path.with_name("step-0000000004"), ignore_errors=True)
    remove_checkpoint(path)


def nothing(path: Path) -> None:
    """A prune that removes nothing."""


@pytest.mark.parametrize("broken", [empty_first, neighbour, nothing])
def test_a_prune_that_removes_too_much_or_nothing_fails_the_prune_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Remove
) -> None:
    monkeypatch.setattr("pt214_dcp.cli.tidy.remove_checkpoint", broken)
    with pytest.raises((AssertionError, pt214_dcp.CheckpointError)):
        prune_and_look(tmp_path)


class Killed(BaseException):
    """In place of SIGKILL: nothing may catch it and tidy up."""


def killed_at(last: int, remove: Remove, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether ``remove`` was killed before it unlinked name number ``last``."""
    unlink, left = os.unlink, [Killed] * last

    def counted(*words: Any, **named: Any) -> None:
        if not left:
            raise Killed
        left.pop()
        unlink(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", counted)
        try:
            remove(path)
        except Killed:
            return True
    return False


def kill_and_look(path: Path, remove: Remove, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill a removal before each name that it unlinks: whole, or no checkpoint, each time."""
    for last in range(100):
        shutil.rmtree(path, ignore_errors=True)
        pt214_dcp.save({"w": torch.ones(3)}, path)
        if not killed_at(last, remove, path, monkeypatch):
            assert not path.exists()
            assert last > 2
            return
        if (path / COMMIT).exists():
            pt214_dcp.verify(path)
    raise AssertionError("100 names were not enough")


def test_a_removal_killed_midway_leaves_no_damaged_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_and_look(tmp_path / "c", remove_checkpoint, monkeypatch)


def root_last(path: Path) -> None:
    """A removal in the order that leaves a record without its data."""
    for folder in path.glob("gen-*"):
        shutil.rmtree(folder)
    shutil.rmtree(path)


def test_a_removal_with_the_root_last_fails_the_kill_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(pt214_dcp.CheckpointError):
        kill_and_look(tmp_path / "c", root_last, monkeypatch)


def test_the_record_is_durably_gone_before_any_data_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pt214_dcp.save({"w": torch.ones(3)}, tmp_path / "c")
    seen: list[bool] = []
    monkeypatch.setattr(
        "pt214_dcp.files.sync_folder",
        lambda path: seen.append((path / COMMIT).exists() or not list(path.glob("gen-*/*"))),
    )
    remove_checkpoint(tmp_path / "c")
    assert seen == [False]  # synced once: without the record, with the data


def test_what_cannot_be_removed_is_told_and_stops_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pt214_dcp.checkpointer.remove_checkpoint", refuse)
    checkpoints = pt214_dcp.Checkpointer(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, {"n": step})
        checkpoints.wait()
    assert "could not remove the checkpoint of step 1: [Errno 13]" in caplog.text
    assert checkpoints.steps() == [1, 2]


def test_a_prune_that_cannot_be_meant_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(tmp_path / "none"), "--keep", "1"]) == 1
    assert "no committed steps in this folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["prune", str(tmp_path), "--keep", "1", "--every", "0"])
    assert caught.value.code == 2
    assert "--every: 0 is not allowed; it must be 1 or more" in capsys.readouterr().err
