"""Copies behind training: a budget that holds, a step that waits, a writer that knows no torch."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import overlap
from pt214_dcp.arena import ARENA, LEAST_BYTES
from pt214_dcp.engine import ProcessWriter, writer_process
from pt214_dcp.feed import feed_of

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_arena() -> Iterator[None]:
    ARENA.release()
    yield
    ARENA.release()


def state(value: float, mib: int = 24) -> dict[str, Any]:
    return {f"w{at}": torch.full((MIB // 4 * 4,), value) for at in range(mib // 4)}


def loaded(path: Path, mib: int = 24) -> set[float]:
    found = state(-1.0, mib)
    pt214_dcp.load(found, path)
    return {float(v) for tensor in found.values() for v in tensor.unique()}


def test_a_state_larger_than_the_budget_is_saved_whole(tmp_path: Path) -> None:
    handle = pt214_dcp.async_save(state(1.0), tmp_path, staging_bytes=8 * MIB)
    handle.wait()
    assert loaded(tmp_path) == {1.0}
    assert handle.written_bytes == handle.rank_size_bytes == 24 * MIB


def test_staging_never_holds_more_than_the_budget(tmp_path: Path) -> None:
    budget = 8 * MIB
    handles = [
        pt214_dcp.async_save(state(float(at)), tmp_path / str(at), staging_bytes=budget)
        for at in range(3)
    ]
    for handle in handles:
        handle.wait()
    held = sum(slot.size_bytes for slot in ARENA._free)
    assert 0 < held <= budget
    assert [loaded(tmp_path / str(at)) for at in range(3)] == [{0.0}, {1.0}, {2.0}]


def test_a_smaller_budget_gives_back_what_a_larger_one_held(tmp_path: Path) -> None:
    pt214_dcp.async_save(state(1.0, 96), tmp_path).wait()
    pt214_dcp.async_save(state(2.0, 96), tmp_path, staging_bytes=64 * MIB).wait()
    assert sum(slot.size_bytes for slot in ARENA._free) <= 64 * MIB
    assert loaded(tmp_path, 96) == {2.0}


@pytest.mark.parametrize("number", [0, LEAST_BYTES - 1, 1e9])
def test_a_budget_that_is_too_small_is_refused(tmp_path: Path, number: Any) -> None:
    with pytest.raises(pt214_dcp.BadOption, match=r"staging_bytes is .* at least 4194304"):
        pt214_dcp.async_save(state(1.0), tmp_path, staging_bytes=number)


def test_tensors_may_change_as_soon_as_the_call_returns(tmp_path: Path) -> None:
    values = state(1.0)
    handle = pt214_dcp.async_save(values, tmp_path)
    for tensor in values.values():
        tensor.fill_(2.0)
    handle.wait()
    assert loaded(tmp_path) == {1.0}


def test_a_save_that_copies_nothing_fails_the_change_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()

    def blocking(plan: Any, tensors: Any, options: Any, _: bool, handle: Any) -> Any:
        feed = feed_of(plan, tensors, options, True, handle)
        into = feed.into
        monkeypatch.setattr(feed, "into", lambda *rest: (gate.wait(), into(*rest))[1])
        return feed

    monkeypatch.setattr("pt214_dcp.saver.feed_of", blocking)
    values = state(1.0)
    handle = pt214_dcp.async_save(values, tmp_path)
    for tensor in values.values():
        tensor.fill_(2.0)
    gate.set()
    handle.wait()
    assert loaded(tmp_path) == {2.0}  # and so the test above would fail


def model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def slow_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Hold the copying thread until the event is set."""
    gate, hold = threading.Event(), overlap.Guard.hold

    def held(self: overlap.Guard, copy: Any) -> Any:
        return hold(self, lambda: (gate.wait(), copy())[1])

    monkeypatch.setattr(overlap.Guard, "hold", held)
    return gate


def test_with_overlap_the_next_step_waits_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = model()
    train(net, optimizer)
    wanted = {key: value.clone() for key, value in net.state_dict().items()}
    gate = slow_copies(monkeypatch)
    handle = pt214_dcp.async_save(net.state_dict(), tmp_path, overlap=optimizer)
    threading.Timer(0.3, gate.set).start()
    train(net, optimizer)  # its forward changes the buffers, its step the parameters
    assert gate.is_set()
    handle.wait()
    found = {key: torch.zeros_like(value) for key, value in wanted.items()}
    pt214_dcp.load(found, tmp_path)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert not optimizer._optimizer_step_pre_hooks


def test_without_the_guard_the_overlap_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = model()
    train(net, optimizer)
    before = net[0].weight.detach().clone()  # type: ignore[index]
    gate = slow_copies(monkeypatch)
    monkeypatch.setattr(optimizer, "register_step_pre_hook", lambda hook: _NoHook())
    handle = pt214_dcp.async_save(net.state_dict(), tmp_path, overlap=optimizer)
    train(net, optimizer)  # a fused step changes no version, so only the hook could have held it
    gate.set()
    handle.exception()
    found = {key: torch.zeros_like(value) for key, value in net.state_dict().items()}
    if handle.exception() is None:
        pt214_dcp.load(found, tmp_path)
        assert not torch.equal(found["0.weight"], before)


class _NoHook:
    def remove(self) -> None: ...


def test_a_change_outside_step_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = model()
    gate = slow_copies(monkeypatch)
    handle = pt214_dcp.async_save(net.state_dict(), tmp_path, overlap=optimizer)
    with torch.no_grad():
        net[0].weight.add_(1)  # type: ignore[index]
    gate.set()
    with pytest.raises(pt214_dcp.SaveFailed, match="changed outside its optimizer's step"):
        handle.wait()
    with pytest.raises(pt214_dcp.NotACheckpoint):
        pt214_dcp.load({}, tmp_path)


def test_what_has_no_hook_is_refused_as_overlap(tmp_path: Path) -> None:
    with pytest.raises(pt214_dcp.BadOption, match="overlap holds a Linear"):
        pt214_dcp.async_save({}, tmp_path, overlap=[torch.nn.Linear(1, 1)])  # type: ignore[list-item]
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], capturable=True)
    with pytest.raises(pt214_dcp.BadOption, match="capturable"):
        pt214_dcp.async_save({}, tmp_path, overlap=optimizer)


def test_the_writer_process_is_small_and_never_imports_torch(tmp_path: Path) -> None:
    pt214_dcp.async_save(state(1.0), tmp_path).wait()
    pid = writer_process().child_pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "xxhash" in maps


def test_a_writer_process_that_dies_fails_the_save_and_the_next_one_works(tmp_path: Path) -> None:
    pt214_dcp.async_save(state(1.0), tmp_path).wait()
    put, pid = ProcessWriter.put, writer_process().child_pid

    def kill_and_put(self: ProcessWriter, *rest: Any) -> None:
        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 20
        while writer_process().child_pid == pid and time.monotonic() < until:
            time.sleep(0.01)
        put(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessWriter, "put", kill_and_put)
        with pytest.raises(pt214_dcp.SaveFailed, match=r"writes checkpoints ended with -9"):
            pt214_dcp.async_save(state(2.0), tmp_path).wait()
    assert loaded(tmp_path) == {1.0}
    pt214_dcp.async_save(state(3.0), tmp_path).wait()
    assert loaded(tmp_path) == {3.0}


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    for save in (pt214_dcp.save, pt214_dcp.async_save):
        seen.clear()
        save(state(1.0), tmp_path, progress=lambda done, total: seen.append((done, total))).wait()
        assert seen[-1] == (24 * MIB, 24 * MIB)
        assert seen == sorted(seen)


def test_prepare_makes_the_memory_and_the_plan_of_the_first_save(tmp_path: Path) -> None:
    pt214_dcp.prepare(state(0.0))
    slots = ARENA._slots
    assert slots * 32 * MIB >= 24 * MIB
    pt214_dcp.async_save(state(1.0), tmp_path).wait()
    assert ARENA._slots == slots
    assert loaded(tmp_path) == {1.0}
