"""Checkpoints in the ranks' own memory: a lost rank's state comes from its partner."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from pt214_dcp.errors import (
    BadOption,
    CheckpointError,
    CommitConflict,
    NotACheckpoint,
    StoreError,
)
from pt214_dcp.peers import PeerMemory, restore_nearest
from pt214_dcp.peers import store as peers_store
from pt214_dcp.peers.client import Peer
from pt214_dcp.peers.memory import PIECE_BYTES, Memory
from pt214_dcp.peers.server import Server
from pt214_dcp.peers.wire import Channel, Side
from pt214_dcp.stores import Place
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLD, LOST, SECRET = 4, 2, b"s" * 32


def whole(step: int) -> torch.Tensor:
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(step))


def sharded(tensor: torch.Tensor) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(tensor, mesh, [Shard(0)]), "b": tensor[0].clone(), "step": 0}


def holds(state: dict[str, Any], step: int) -> bool:
    full = state["w"].full_tensor()
    return torch.equal(full, whole(step)) and torch.equal(state["b"], whole(step)[0])


def meet(folder: Path, rank: int, name: str) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=WORLD, init_method=f"file://{folder / name}",
        timeout=timedelta(seconds=60),
    )  # fmt: skip


def _lose_one(process: int, folder: Path, sabotage: bool) -> None:
    """Processes 0 to 3 save; the third is killed; process 4 takes its place."""
    dist.barrier()
    dist.destroy_process_group()
    if sabotage:
        peers_store.partner_of = lambda rank, world_size: rank  # nobody holds a copy
    rank = LOST if process == WORLD else process
    if process < WORLD:
        meet(folder, rank, "first")
        memory = PeerMemory(1 << 20, host="127.0.0.1")
        checkpointer = pt214_dcp.Checkpointer(Place(memory), keep=1)
        for step in (1, 2, 3):
            checkpointer.save(step, sharded(whole(step)) | {"step": step})
            checkpointer.wait()
        dist.barrier()  # rank 0 has pruned once its own wait has ended
        assert checkpointer.steps() == [3]
        dist.barrier()
        if rank == LOST:
            (folder / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.destroy_process_group()
        wait_for((folder / "pid").exists)
        meet(folder, rank, "second")
        memory.rejoin()
    else:
        wait_for((folder / "pid").exists)
        meet(folder, rank, "second")
        memory = PeerMemory(1 << 20, host="127.0.0.1")
    disk = pt214_dcp.Checkpointer(folder / "disk")
    tiers = [pt214_dcp.Checkpointer(Place(memory), keep=1), disk]
    blank = sharded(torch.zeros(40, 6))
    if sabotage:
        with pytest.raises(CheckpointError):
            restore_nearest(blank, tiers)
    else:
        step, tier = restore_nearest(blank, tiers)
        assert (step, tier, blank["step"]) == (3, tiers[0], 3)
        assert holds(blank, 3)
        tiers[0].save(4, sharded(whole(4)))  # and all goes on
        tiers[0].wait()
        assert tiers[0].restore(blank) == 4
        assert holds(blank, 4)
    dist.barrier()
    memory.close()


def wait_for(ready: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("sabotage", [False, True], ids=["partner", "saboteur without partner"])
def test_a_lost_ranks_state_comes_from_its_partners_memory(
    tmp_path: Path, begin_ranks: Callable[..., Any], sabotage: bool
) -> None:
    processes = begin_ranks(WORLD + 1, _lose_one, tmp_path, sabotage)
    for process in processes:
        process.join(90)
    errors = "\n".join(path.read_text() for path in tmp_path.glob("store-*.error.*"))
    codes = [process.exitcode for process in processes]
    assert codes == [0, 0, -signal.SIGKILL, 0, 0], f"{codes}\n{errors}"


def _fall_back(rank: int, folder: Path) -> None:
    memory = PeerMemory(1 << 20, host="127.0.0.1")
    near = pt214_dcp.Checkpointer(Place(memory))
    far = pt214_dcp.Checkpointer(folder / "disk")
    blank = sharded(torch.zeros(40, 6))
    with pytest.raises(NotACheckpoint, match="no checkpoint in any of"):
        restore_nearest(blank, [near, far])
    far.save(1, sharded(whole(1)))
    far.wait()
    near.save(1, sharded(whole(1)))
    near.wait()
    assert restore_nearest(blank, [near, far])[1] is near
    far.save(2, sharded(whole(2)))
    far.wait()
    assert restore_nearest(blank, [near, far])[1] is far  # newer beats nearer
    assert holds(blank, 2)
    dist.barrier()
    near.save(3, sharded(whole(3)))
    near.wait()
    dist.barrier()
    if rank == 1:  # damaged on one rank: all leave this tier
        for entry in [*memory.list("step-0000000003")]:
            if ".safetensors" in entry.name:
                memory.delete([entry.name])
    dist.barrier()
    assert restore_nearest(blank, [near, far]) == (2, far)
    assert holds(blank, 2)
    dist.barrier()
    memory.close()


def test_the_newest_step_wins_then_the_nearest_and_damage_is_left_by_all(
    tmp_path: Path, run_ranks: Callable[..., None]
) -> None:
    run_ranks(2, _fall_back, tmp_path)


@pytest.fixture
def alone() -> Any:
    memory = PeerMemory(64 << 20, host="127.0.0.1")
    yield memory
    memory.close()


def test_a_rank_alone_saves_to_and_loads_from_its_own_memory(alone: PeerMemory) -> None:
    place = Place(alone)
    saved: dict[str, Any] = {"w": torch.randn(5_000_000), "n": 3}
    pt214_dcp.save(saved, place / "a")
    blank: dict[str, Any] = {"w": torch.zeros(5_000_000), "n": 0}
    pt214_dcp.load(blank, place / "a")
    assert torch.equal(blank["w"], saved["w"])
    assert pt214_dcp.verify(place / "a").errors == ()


def test_a_full_budget_fails_the_save_and_keeps_the_old(alone: PeerMemory) -> None:
    place = Place(alone) / "a"
    pt214_dcp.save({"w": torch.ones(1000)}, place)
    held = alone.memory.size_bytes
    with pytest.raises(pt214_dcp.SaveFailed, match="would pass the budget of 67108864"):
        pt214_dcp.save({"w": torch.zeros(20_000_000)}, place)
    assert alone.memory.size_bytes == held
    blank = {"w": torch.zeros(1000)}
    pt214_dcp.load(blank, place)
    assert blank["w"].sum() == 1000


def test_what_is_dropped_gives_its_room_back() -> None:
    memory = Memory(10)
    memory.append("a", b"12345", 0)
    memory.append("a", b"67890", 5)
    with pytest.raises(StoreError, match="more would pass"):
        memory.append("b", b"x", 0)
    with pytest.raises(StoreError, match="so none fit at 3"):
        memory.append("a", b"x", 3)
    with pytest.raises(FileNotFoundError):
        memory.read("a", 0, 1)  # not whole yet
    memory.drop_parts()
    assert memory.size_bytes == 0
    memory.append("a", b"x", 0)
    memory.finish("a")
    memory.drop_parts()
    assert memory.read("a", 0, 9) == b"x"


def test_a_root_of_an_older_version_is_refused() -> None:
    memory = Memory(100)
    memory.set_root("r", b"one", 1)
    memory.set_root("r", b"three", 3)
    with pytest.raises(CommitConflict, match="another saver"):
        memory.set_root("r", b"two", 2)
    assert memory.root("r") == (b"three", 3)
    assert memory.size_bytes == 5


@pytest.fixture
def server() -> Any:
    memory = Memory(1 << 20)
    memory.append("name", b"payload", 0)
    memory.finish("name")
    server = Server(memory, "127.0.0.1", SECRET)
    yield server
    server.close()


def test_who_knows_the_secret_is_answered(server: Server) -> None:
    peer = Peer(1, ("127.0.0.1", server.port), SECRET, 10.0)
    assert peer.ask("read", name="name", offset=3, size=PIECE_BYTES)[1] == b"load"
    with pytest.raises(FileNotFoundError, match="peer of rank 1"):
        peer.ask("size", name="other")
    with pytest.raises(FileExistsError):
        peer.ask("finish", name="name")
    with pytest.raises(StoreError, match="no such request: 'sing'"):
        peer.ask("sing")
    peer.close()


def test_who_does_not_know_the_secret_gets_nothing(server: Server) -> None:
    peer = Peer(1, ("127.0.0.1", server.port), b"x" * 32, 10.0)
    with pytest.raises(StoreError, match="peer of rank 1"):
        peer.ask("read", name="name", offset=0, size=7)
    with pytest.raises(StoreError, match="lost a moment ago"):
        peer.ask("read", name="name", offset=0, size=7)


def test_a_hostile_first_frame_makes_no_memory_be_taken(server: Server) -> None:
    for sizes in (b"\xff" * 12, (9).to_bytes(4, "little") + (1 << 40).to_bytes(8, "little")):
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(b"n" * 32 + sizes)
            sock.recv(32, socket.MSG_WAITALL)
            assert sock.recv(1) == b""  # hung up


@pytest.mark.parametrize("forged", ["flipped", "replayed"])
def test_a_forged_frame_is_noticed(forged: str) -> None:
    here, there = socket.socketpair()
    middle = bytearray()
    ours: list[Channel] = []
    thread = threading.Thread(target=lambda: ours.append(Channel(here, SECRET, Side.CLIENT)))
    thread.start()
    theirs = Channel(there, SECRET, Side.SERVER)
    thread.join()
    ours[0].send({"op": "x"})
    assert theirs.receive() == ({"op": "x"}, b"")
    ours[0].send({"op": "append"}, b"payload")
    middle += there.recv(4096)  # as who sits on the wire would
    if forged == "flipped":
        middle[-1] ^= 1
        here.sendall(middle)
    else:
        here.sendall(middle)
        theirs.receive()
        here.sendall(middle)
    with pytest.raises(StoreError, match="wrong code"):
        theirs.receive()
    ours[0].close()
    theirs.close()


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(BadOption, match="budget_bytes is 0"):
        PeerMemory(0)
    with pytest.raises(BadOption, match="at most 64 bytes"):
        PeerMemory(1, host="h" * 65)
