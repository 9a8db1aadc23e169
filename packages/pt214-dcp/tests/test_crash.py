"""SIGKILL at random moments: the path holds the old or the new checkpoint, whole.

A checkpoint of step n holds n in each element of each tensor, so a mix of two steps shows. SIGKILL
says nothing of fsync: ``test_commit.py`` proves the order.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from pt214_dcp import commit, engine, files
from pt214_dcp.blocks import Written
from pt214_dcp.repair import repair
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor import init_device_mesh as mesh_of  # type: ignore[attr-defined]

# Savers killed, by ranks: a few by default, 500 and more under ``nox -s soak``.
KILLS = {1: 8, 2: 8, 4: 4, 8: 1}
SOAK = int(os.environ.get("PT214_KILLS", "0"))
if SOAK:
    KILLS = {1: SOAK // 4, 2: SOAK // 4, 4: SOAK // 4 + SOAK % 4, 8: SOAK // 4}
DEADLINE_S = 60.0
Begin = Callable[..., list[BaseProcess]]


def state_of(step: int) -> dict[str, Any]:
    """About 2 MiB, so that a save has several phases to be killed in."""
    state: dict[str, Any] = {f"p{at}": torch.full((300, 100), float(step)) for at in range(10)}
    if dist.is_initialized():
        mesh = mesh_of("cpu", (dist.get_world_size(),))
        whole = torch.full((1001, 200), float(step))
        state["sharded"] = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    else:
        state["sharded"] = torch.full((1001, 200), float(step))
    return state | {"step": step}


def save_for_ever(rank: int, path: str) -> None:
    step = 0
    while True:
        step += 1
        pt214_dcp.save(state_of(step), path)


def save_with_one_late(rank: int, path: str) -> None:
    """As ``save_for_ever``; the last rank is late with its data by up to 30 ms."""
    close, chance = engine.ThreadWriter.close, random.Random(rank)

    def late(self: engine.ThreadWriter) -> tuple[Written, int]:
        time.sleep(chance.uniform(0, 0.03))
        return close(self)

    if rank == dist.get_world_size() - 1:
        setattr(engine.ThreadWriter, "close", late)  # noqa: B010
    save_for_ever(rank, path)


def save_behind(rank: int, path: str) -> None:
    """Asynchronous saves, written by the writer process, whose pid is told."""
    Path(f"{path}.writer-{rank}").write_text(str(engine.writer_process().child_pid))
    step = 0
    while True:
        step += 1
        pt214_dcp.async_save(state_of(step), path).wait()


def save_in_place(rank: int, path: str) -> None:
    """Broken twin: data goes into the files that are already there, too, before the commit."""
    close = engine.ThreadWriter.close

    def overwrite(self: engine.ThreadWriter) -> tuple[Written, int]:
        ended = close(self)
        files_now = sorted(Path(path).glob("gen-*/*.safetensors"), key=os.path.getmtime)
        for old in files_now[:-1]:
            with open(old, "r+b") as stream:
                stream.write(files_now[-1].read_bytes())
        return ended

    setattr(engine.ThreadWriter, "close", overwrite)  # noqa: B010  # a twin
    save_for_ever(rank, path)


def save_nothing(rank: int, path: str) -> None:
    """Broken twin: says that it saved."""
    while True:
        time.sleep(0.001)


def until_committed(path: Path) -> None:
    until = time.monotonic() + DEADLINE_S
    while commit.committed(path) is None:
        assert time.monotonic() < until, "no save was ever committed"
        time.sleep(0.002)


def kill_savers(
    begin: Begin, saver: Callable[..., None], path: Path, ranks: int, seed: int
) -> str | None:
    """Kill all ranks at a random moment; the generation that was committed just before."""
    processes = begin(ranks, saver, str(path))
    until_committed(path)
    time.sleep(random.Random(seed).uniform(0, 0.15))  # the moment is the test's input
    random.Random(seed).shuffle(processes)
    before = commit.committed(path)
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGKILL
    return before


def whole_step(path: Path) -> int:
    """The one step whose values are in all tensors."""
    pt214_dcp.verify(path)
    state = state_of(0)
    pt214_dcp.load(state, path, alone=True)
    step = state.pop("step")
    values = {key: set(tensor.unique().tolist()) for key, tensor in state.items()}
    assert all(found == {float(step)} for found in values.values()), values
    return int(step)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "checkpoint"
    shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)


def kill_often(
    begin: Begin, disk: Path, saver: Callable[..., None], ranks: int, count: int
) -> Counter[str]:
    """Kill ``count`` times; what the path held after each: the old checkpoint or the new."""
    seen: Counter[str] = Counter()
    for seed in range(count):
        shutil.rmtree(disk, ignore_errors=True)
        before = kill_savers(begin, saver, disk, ranks, seed)
        seen["old" if commit.committed(disk) == before else "new"] += 1
        step = whole_step(disk)
        assert step >= 1
        left = repair(disk, quiet_s=0)
        assert len(list(disk.iterdir())) == 2, left
        assert whole_step(disk) == step
        pt214_dcp.save(state_of(step + 1), disk)
        assert whole_step(disk) == step + 1
    return seen


@pytest.mark.parametrize("ranks", KILLS)
def test_killed_savers_leave_a_whole_checkpoint(
    begin_ranks: Begin, disk: Path, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    seen = kill_often(begin_ranks, disk, save_for_ever, ranks, KILLS[ranks])
    record_property("outcomes", dict(seen))
    if SOAK and ranks == 4:
        assert seen["new"] >= 5
        assert seen["old"] >= 10


@pytest.mark.parametrize("ranks", [2, 4])
def test_killed_savers_of_which_one_is_late_leave_a_whole_checkpoint(
    begin_ranks: Begin, disk: Path, ranks: int
) -> None:
    kill_often(begin_ranks, disk, save_with_one_late, ranks, SOAK // 10 or 2)


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_killed_trainer_takes_its_writer_along_and_leaves_a_whole_checkpoint(
    begin_ranks: Begin, disk: Path, ranks: int
) -> None:
    kill_often(begin_ranks, disk, save_behind, ranks, SOAK // 10 or 3)
    until = time.monotonic() + DEADLINE_S
    for file in disk.parent.glob("checkpoint.writer-*"):
        while Path(f"/proc/{file.read_text()}").exists():
            assert time.monotonic() < until, "a writer process outlived its trainer"
            time.sleep(0.01)


def test_a_saver_that_overwrites_in_place_fails_the_kill_test(
    begin_ranks: Begin, disk: Path
) -> None:
    def kill_until_caught() -> None:
        for seed in range(20):
            shutil.rmtree(disk, ignore_errors=True)
            kill_savers(begin_ranks, save_in_place, disk, 1, seed)
            whole_step(disk)

    with pytest.raises((pt214_dcp.ChunkCorrupt, AssertionError)):
        kill_until_caught()


def test_a_saver_that_saves_nothing_fails_the_kill_test(
    begin_ranks: Begin, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.DEADLINE_S", 0.3)
    with pytest.raises(AssertionError, match="no save was ever committed"):
        kill_savers(begin_ranks, save_nothing, disk, 1, 0)


def lose_rank_one(rank: int, path: str) -> None:
    pt214_dcp.save({"w": torch.ones(4)}, path)
    writes = files.write_new
    if rank == 1:

        def die(*args: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(files, "write_new", die)  # noqa: B010
        pt214_dcp.async_save({"w": torch.zeros(4)}, path).wait()
    handle = pt214_dcp.async_save({"w": torch.zeros(4)}, path, timeout_s=1.0)
    with pytest.raises(pt214_dcp.SaveFailed, match=r"no word in time from (ranks \[1\]|rank 0)"):
        handle.wait()
    with pytest.raises(pt214_dcp.SaveFailed, match="lost the others"):
        pt214_dcp.save({"w": torch.zeros(4)}, path)
    files.write_new = writes
    if rank == 0:
        state = {"w": torch.zeros(4)}
        pt214_dcp.load(state, path, alone=True)
        assert bool((state["w"] == 1).all())
        pt214_dcp.save({"w": torch.full((4,), 2.0)}, path, alone=True)
    Path(f"{path}.survived-{rank}").touch()


def test_a_rank_killed_in_the_background_is_named_and_the_old_checkpoint_stays(
    begin_ranks: Begin, disk: Path
) -> None:
    processes = begin_ranks(3, lose_rank_one, str(disk))
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes][1] == -signal.SIGKILL
    assert [Path(f"{disk}.survived-{rank}").exists() for rank in (0, 2)] == [True, True]
    state = {"w": torch.zeros(4)}
    pt214_dcp.load(state, disk)
    assert bool((state["w"] == 2).all())


def cancel_rank(rank: int, path: str) -> None:
    pt214_dcp.save({"w": torch.ones(4)}, path)
    held = files.write_new
    if rank == 1:

        def hold(file: Path, data: Any, check: Callable[[], None]) -> None:
            until = time.monotonic() + DEADLINE_S
            while time.monotonic() < until:
                check()
                time.sleep(0.001)

        setattr(files, "write_new", hold)  # noqa: B010
    handle = pt214_dcp.async_save({"w": torch.zeros(4)}, path)
    assert handle.cancel()
    with pytest.raises(pt214_dcp.SaveFailed):
        handle.wait(DEADLINE_S)
    files.write_new = held
    state = {"w": torch.zeros(4)}
    pt214_dcp.load(state, path)
    assert bool((state["w"] == 1).all())
    pt214_dcp.save({"w": torch.full((4,), 3.0)}, path)


def test_a_cancelled_save_commits_nothing_and_the_next_one_works(
    run_ranks: Callable[..., None], disk: Path
) -> None:
    run_ranks(2, cancel_rank, str(disk))
    assert len(list(disk.glob("gen-*"))) <= 2
