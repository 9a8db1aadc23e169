"""How long does a durable save take, of large tensors and of 20,000 small ones? And a load?

Large: ``PT214_BENCH_GIB`` GiB in tensors of 16 MiB. Rivals: ``raw`` is pwrite in pieces of 16 MiB
and one fsync; ``stock`` is torch.distributed.checkpoint with its default thread and fsync,
``stock 4`` with four threads. Loads are warm, ours with every checksum; ``raw`` is preadv into the
same tensors with as many threads as ours has. What was saved is loaded and compared bit by bit.
"""

from __future__ import annotations

import os
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed.checkpoint as stock_dcp
from harness import gib, in_turns, report, rows, seconds
from pt214_dcp.arena import memory
from pt214_dcp.reads import THREADS

PIECE = 16 << 20
SMALL, SMALL_BYTES = 20_000, 16 << 10
State = dict[str, Any]


def large() -> State:
    count = max(1, int(gib() * 2**30 / PIECE))
    return {f"w{at}": torch.randn(PIECE // 4) for at in range(count)}


def small() -> State:
    return {f"w{at}": torch.randn(SMALL_BYTES // 4) for at in range(SMALL)}


def blank(state: State) -> State:
    return {key: torch.zeros_like(value) for key, value in state.items()}


def fresh(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    os.sync()  # what the one before left to write must not be on this one's clock
    return path


def raw_save(state: State, path: Path) -> None:
    path.mkdir()
    fd = os.open(path / "data", os.O_WRONLY | os.O_CREAT)
    at = 0
    for tensor in state.values():
        view = memory(tensor)
        for begin in range(0, len(view), PIECE):
            at += os.pwrite(fd, view[begin : begin + PIECE], at)
    os.fsync(fd)
    os.close(fd)


def raw_load(state: State, path: Path) -> None:
    fd = os.open(path / "data", os.O_RDONLY)
    at, jobs = 0, []
    for tensor in state.values():
        view = memory(tensor)
        jobs.append((view, at))
        at += len(view)
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda job: os.preadv(fd, [job[0]], job[1]), jobs))
    os.close(fd)


def stock_save(state: State, path: Path, threads: int = 1) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        writer = stock_dcp.FileSystemWriter(path, thread_count=threads)
        stock_dcp.save(state, storage_writer=writer)


def stock_load(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock_dcp.load(state, checkpoint_id=path)


def check(state: State, found: State) -> None:
    for key, value in state.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("kind", ["large", "small"])
def test_save_and_load(kind: str, tmp_path: Path, benchmark: Any) -> None:
    state = large() if kind == "large" else small()
    case = f"{gib():g} GiB in pieces of 16 MiB" if kind == "large" else "20,000 tensors of 16 KiB"
    saves = {
        "ours": lambda: seconds(lambda: pt214_dcp.save(state, fresh(tmp_path / "ours"))),
        "stock": lambda: seconds(lambda: stock_save(state, fresh(tmp_path / "stock"))),
        "stock 4": lambda: seconds(lambda: stock_save(state, fresh(tmp_path / "stock4"), 4)),
        "raw": lambda: seconds(lambda: raw_save(state, fresh(tmp_path / "raw"))),
    }
    found = rows(f"save {case}", "s", in_turns(saves))
    into = blank(state)
    loads = {
        "ours": lambda: seconds(lambda: pt214_dcp.load(into, tmp_path / "ours")),
        "stock": lambda: seconds(lambda: stock_load(into, tmp_path / "stock")),
        "raw": lambda: seconds(lambda: raw_load(into, tmp_path / "raw")),
    }
    found += rows(f"load {case}", "s", in_turns(loads))
    into = blank(state)
    pt214_dcp.load(into, tmp_path / "ours")
    check(state, into)
    report(f"dcp_save_{kind}", found, benchmark)
