"""Going back from a damaged checkpoint: which one, on which ranks, and what is kept after that."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.fallback import Met, met
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

Damage = Callable[[Path], None]


def data_of(path: Path, rank: int = 0) -> Path:
    files = path.glob(f"gen-*/rank-{rank:05d}.*")
    (file,) = (each for each in files if each.suffix in {".safetensors", ".data"})
    return file


def flip_data(path: Path, rank: int = 0) -> None:
    file = data_of(path, rank)
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def flip_manifest(path: Path) -> None:
    (file,) = path.glob("gen-*/rank-00000.manifest")
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def flip_root(path: Path) -> None:
    (path / "COMMIT.json").write_bytes((path / "COMMIT.json").read_bytes()[:-5] + b"xxxxx")


def lose_data(path: Path) -> None:
    data_of(path).unlink()


DAMAGES = [flip_data, flip_manifest, flip_root, lose_data]


def saved(folder: Path, steps: range, **options: Any) -> Checkpointer:
    checkpoints = Checkpointer(folder, keep=None, **options)
    for step in steps:
        checkpoints.save(step, {"w": torch.full((4,), float(step)), "step": step})
    checkpoints.wait()
    return checkpoints


def folder_of(checkpoints: Checkpointer, step: int) -> Path:
    return Path(str(checkpoints.path(step)))  # a folder here, not a place in a store


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(4), "step": -1}


def go_back_and_look(folder: Path, damage: Damage) -> None:
    """Damage the newest two of four; what is restored must be the second, bit for bit."""
    checkpoints = saved(folder, range(1, 5))
    for step in (3, 4):
        damage(folder_of(checkpoints, step))
    assert checkpoints.latest_valid() == 2
    state = blank()
    assert Checkpointer(folder).restore(state, fallback=True) == 2
    assert (state["w"].tolist(), state["step"]) == ([2.0] * 4, 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_goes_back_to_the_newest_that_is_whole(tmp_path: Path, damage: Damage) -> None:
    go_back_and_look(tmp_path, damage)


@pytest.mark.parametrize("damage", DAMAGES)
def test_without_fallback_damage_is_an_error_that_names_the_way_out(
    tmp_path: Path, damage: Damage
) -> None:
    damage(folder_of(saved(tmp_path, range(1, 3)), 2))
    with pytest.raises(pt214_dcp.ChunkCorrupt) as caught:
        Checkpointer(tmp_path).restore(blank())
    assert "restore(fallback=True) loads the newest that is not damaged" in caught.value.__notes__


def test_a_load_that_always_raises_fails_the_fallback_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise pt214_dcp.ChunkCorrupt("always")

    monkeypatch.setattr("pt214_dcp.checkpointer.load", never)
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="always"):
        go_back_and_look(tmp_path, flip_data)


class Equal(int):
    """A checksum that fits any bytes."""

    def __ne__(self, other: object) -> bool:
        return False


def test_a_load_and_a_verify_that_check_nothing_fail_the_fallback_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pt214_dcp.data_files.checksum", lambda _: Equal())
    with pytest.raises(AssertionError):
        go_back_and_look(tmp_path, flip_data)


def test_where_all_are_damaged_the_newest_ones_error_is_raised(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, range(1, 3))
    for step in (1, 2):
        flip_data(folder_of(checkpoints, step))
    assert checkpoints.latest_valid() is None
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="step-0000000002"):
        checkpoints.restore(blank(), fallback=True)
    with pytest.raises(pt214_dcp.NotACheckpoint, match="no committed checkpoint"):
        Checkpointer(tmp_path / "none").restore(blank(), fallback=True)
    assert Checkpointer(tmp_path / "none").latest_valid() is None


def test_a_state_that_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, range(1, 3))
    with pytest.raises(pt214_dcp.StateMismatch, match="step-0000000002"):
        checkpoints.restore({"w": torch.zeros(5), "step": 0}, fallback=True)


def test_what_a_load_meets_is_told_apart() -> None:
    assert met(pt214_dcp.ChunkCorrupt("")) is Met.DAMAGE
    assert met(OSError(errno.EIO, "Input/output error")) is Met.DAMAGE
    assert met(PermissionError(errno.EACCES, "Permission denied")) is Met.OTHER
    assert met(pt214_dcp.LoadFailed("")) is Met.ANOTHER_RANKS
    assert met(pt214_dcp.StateMismatch("", (), (), ())) is Met.OTHER


def keep_and_look(folder: Path) -> None:
    """After going back from 3 to 2, retention must not prefer the damaged 3 to the whole 2."""
    flip_data(folder_of(saved(folder, range(1, 4)), 3))
    resumed = Checkpointer(folder, keep=1)
    assert resumed.restore(blank(), fallback=True) == 2
    resumed._prune(before=3)  # as a save that then fails does
    assert folder_of(resumed, 2).exists()
    resumed.save(3, {"w": torch.full((4,), 3.0), "step": 3})
    resumed.wait()
    assert resumed.steps() == [3]
    assert resumed.latest_valid() == 3


def test_retention_counts_no_damaged_step_as_kept(tmp_path: Path) -> None:
    keep_and_look(tmp_path)


def test_a_retention_that_counts_damaged_steps_fails_the_test_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpointer, "_whole", Checkpointer.steps)
    with pytest.raises(AssertionError):
        keep_and_look(tmp_path)


def lean_and_look(folder: Path) -> None:
    """Incremental saves after going back must link no block of a damaged step."""
    frozen = torch.arange(1 << 20)
    before = Checkpointer(folder, keep=None, full_every=1)
    for step in (1, 9):
        before.save(step, {"w": frozen, "step": step})
    before.wait()
    flip_data(folder_of(before, 9))
    resumed = Checkpointer(folder, keep=None, full_every=100)
    assert resumed.restore({"w": torch.zeros_like(frozen), "step": 0}, fallback=True) == 1
    for step in (2, 3):
        resumed.save(step, {"w": frozen, "step": step})
        resumed.wait()
        pt214_dcp.verify(resumed.path(step))


def test_no_incremental_save_leans_on_a_damaged_step(tmp_path: Path) -> None:
    lean_and_look(tmp_path)


def test_saves_that_lean_on_whatever_is_newest_fail_the_test_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpointer, "_whole", Checkpointer.steps)
    with pytest.raises(pt214_dcp.CheckpointError):
        lean_and_look(tmp_path)


def rank_goes_back(rank: int, folder: Path) -> None:
    logging.getLogger("pt214_dcp").setLevel(logging.ERROR)
    mesh = init_device_mesh("cpu", (2,))
    checkpoints = Checkpointer(folder, keep=None)
    for step in (1, 2):
        full = torch.arange(8.0) + step
        checkpoints.save(step, {"w": distribute_tensor(full, mesh, [Shard(0)]), "step": step})
        checkpoints.wait()
    if rank == 1:  # its part only: rank 0 meets no damage itself
        flip_data(folder_of(checkpoints, 2), rank)
    dist.barrier()
    state: dict[str, Any] = {"w": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]), "step": 0}
    assert checkpoints.restore(state, fallback=True) == 1
    assert state["w"].full_tensor().tolist() == (torch.arange(8.0) + 1).tolist()
    assert state["step"] == 1


def test_damage_that_one_rank_meets_takes_all_ranks_back(
    tmp_path: Path, run_ranks: Callable[..., None]
) -> None:
    run_ranks(2, rank_goes_back, tmp_path / "c")


def rank_does_not_fit(rank: int, folder: Path) -> None:
    checkpoints = Checkpointer(folder, keep=None)
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.ones(3)})
        checkpoints.wait()
    wanted = pt214_dcp.StateMismatch if rank else pt214_dcp.LoadFailed
    with pytest.raises(wanted):
        checkpoints.restore({"w": torch.zeros(3 + rank)}, fallback=True)


def test_where_a_rank_does_not_fit_none_goes_back_and_all_raise(
    tmp_path: Path, run_ranks: Callable[..., None]
) -> None:
    run_ranks(2, rank_does_not_fit, tmp_path / "c")
