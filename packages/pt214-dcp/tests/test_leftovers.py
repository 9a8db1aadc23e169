"""Clocks that jump and cleaners that race with savers: no live save and no checkpoint is lost."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import commit, files, leftovers
from pt214_dcp.repair import repair

YEARS_S = 10 * 365 * 86400.0
REAL_TIME = time.time


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(step)), "step": step}


def loaded(path: Path) -> int:
    found = state(0)
    pt214_dcp.load(found, path)
    assert bool((found["w"] == found["step"]).all())
    return int(found["step"])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A checkpoint of step 1; signs of life come and are waited for within tenths of a second."""
    monkeypatch.setattr(leftovers, "BEAT_S", 0.05)
    monkeypatch.setattr(leftovers, "WATCH_S", 0.5)
    pt214_dcp.save(state(1), tmp_path / "c")
    yield tmp_path / "c"
    assert loaded(tmp_path / "c") >= 1


def generation(path: Path, age_s: float) -> Path:
    """What a saver has written and not committed, so many seconds ago by the disk's clock."""
    folder = path / f"gen-{uuid.uuid4().hex}"
    folder.mkdir()
    (folder / "rank-00000.safetensors").write_bytes(b"x" * 100)
    for entry in (folder / "rank-00000.safetensors", folder):
        os.utime(entry, times=(REAL_TIME() - age_s,) * 2)
    return folder


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "time", lambda: REAL_TIME() + seconds)


def by_the_hosts_clock(path: Path, quiet_s: float) -> None:
    """The broken twin of ``repair``: it asks this host what time it is."""
    for entry in path.glob("gen-*"):
        if entry != path / str(commit.committed(path)) and (
            time.time() - entry.stat().st_mtime > quiet_s
        ):
            shutil.rmtree(entry)


def young_stays_old_goes(
    path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, clean: Callable[..., object]
) -> None:
    young, old = generation(path, 5), generation(path, 7200)
    jump(monkeypatch, seconds)
    clean(path, quiet_s=600.0)
    assert (young.exists(), old.exists()) == (True, False)


@pytest.mark.parametrize("seconds", [-YEARS_S, 0.0, YEARS_S])
def test_a_repair_asks_no_clock_that_may_have_jumped(
    path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    young_stays_old_goes(path, monkeypatch, seconds, repair)


@pytest.mark.parametrize("seconds", [-YEARS_S, YEARS_S])
def test_a_repair_by_the_hosts_clock_is_caught(
    path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    with pytest.raises(AssertionError):
        young_stays_old_goes(path, monkeypatch, seconds, by_the_hosts_clock)


@pytest.mark.parametrize("age_s", [YEARS_S, -YEARS_S])
def test_a_live_save_is_seen_to_live_whatever_its_time_says(path: Path, age_s: float) -> None:
    """The disk's own clock has jumped, too: only what is watched tells."""
    dead, live = generation(path, age_s), generation(path, age_s)
    with leftovers.alive(live):
        found = repair(path, quiet_s=600)
    assert found.removed == [dead]
    assert found.kept[live] == "it changes: its saver lives"
    assert live.exists()
    assert not dead.exists()


def test_a_saver_without_a_beat_is_caught(path: Path) -> None:
    live = generation(path, YEARS_S)
    assert repair(path, quiet_s=600).removed == [live]  # and so the test above would fail


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("seconds", [-YEARS_S, YEARS_S])
def test_saves_and_retention_do_not_mind_a_jump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, call: str
) -> None:
    keeper = pt214_dcp.Checkpointer(tmp_path / "steps", keep=2)
    for step in range(1, 5):
        jump(monkeypatch, seconds * (step % 2))
        getattr(pt214_dcp, call)(state(step), tmp_path / "c", timeout_s=60).wait()
        assert loaded(tmp_path / "c") == step
        keeper.save(step, state(step))
        keeper.wait()
        assert keeper.latest() == step
        assert keeper.steps() == [at for at in (step - 1, step) if at]
    found = state(0)
    assert keeper.restore(found) == 4
    assert len(list((tmp_path / "c").glob("gen-*"))) == 1


def whole_delete(folder: Path) -> None:
    """The broken twin of ``take_away``: killed after the first file."""
    next(folder.glob("*.safetensors")).unlink()


def cleaned_before_the_commit(
    path: Path, monkeypatch: pytest.MonkeyPatch, clean: Callable[[Path], object]
) -> None:
    """A cleaner takes the save for dead at the worst moment: its files are there, no record is."""
    writes = files.write_new

    def write(target: Path, *args: Any) -> None:
        if target.name == "COMMIT.json":
            clean(target.parent)
        writes(target, *args)

    monkeypatch.setattr(files, "write_new", write)
    with pytest.raises(pt214_dcp.SaveFailed, match="taken away before its commit"):
        pt214_dcp.save(state(2), path)
    assert loaded(path) == 1
    monkeypatch.setattr(files, "write_new", writes)
    pt214_dcp.save(state(3), path)
    assert loaded(path) == 3


def test_a_save_that_is_taken_for_dead_fails_as_a_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned_before_the_commit(path, monkeypatch, leftovers.take_away)


def test_a_cleaner_that_removes_in_place_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pt214_dcp.save(state(1), tmp_path / "c")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        cleaned_before_the_commit(tmp_path / "c", monkeypatch, whole_delete)
    with pytest.raises((pt214_dcp.CheckpointError, OSError)):
        loaded(tmp_path / "c")  # what was committed is half removed


def test_what_was_committed_meanwhile_is_put_back(path: Path) -> None:
    current = path / str(commit.committed(path))
    assert not leftovers.take_away(current)
    assert loaded(path) == 1


def test_a_cleaner_that_looks_only_once_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pt214_dcp.save(state(1), tmp_path)
    current = tmp_path / str(commit.committed(tmp_path))
    monkeypatch.setattr(leftovers, "named", lambda _: None)
    assert leftovers.take_away(current)
    with pytest.raises(pt214_dcp.CheckpointError):
        loaded(tmp_path)


def test_what_a_killed_cleaner_began_is_ended(path: Path) -> None:
    old = generation(path, 7200)
    old.rename(old.with_name(old.name.replace("gen-", "gone-")))
    current = path / str(commit.committed(path))
    gone = current.with_name(current.name.replace("gen-", "gone-"))
    current.rename(gone)  # killed between its rename and its second look
    repair(path)
    assert sorted(entry.name for entry in path.iterdir()) == ["COMMIT.json", current.name]


def test_the_next_saves_remove_what_a_killed_one_left(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, young = generation(path, 7200), generation(path, 0)
    monkeypatch.setattr(leftovers, "WATCH_S", 0.2)
    pt214_dcp.save(state(2), path, timeout_s=60)  # sees it
    time.sleep(0.3)
    pt214_dcp.save(state(3), path, timeout_s=60)  # sees that it did not change
    assert not left.exists()
    assert young.exists()
