"""How long does an asynchronous save hold training, and how much does its rest slow a step?

``blocked``: the call, for ``PT214_BENCH_GIB`` GiB on the CPU; rivals are a warm copy of the state
(``memcpy``) and stock's ``async_save``. ``first`` is the first call after ``prepare``. ``step`` is
the mean of training steps while 20,000 tensors are saved behind them, over the mean of steps that
nothing disturbs; stock's likewise. ``memory`` is what the process and its writer hold above the
state, at their peak, in MiB, beside the budget.
"""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed.checkpoint as stock_dcp
from bench_dcp_save import blank, check, fresh, large, small
from harness import gib, in_turns, report, rounds, rows, seconds
from pt214_dcp.arena import ARENA

State = dict[str, Any]


def stock_async(state: State, path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stock_dcp.async_save(state, checkpoint_id=path)


def test_blocked(tmp_path: Path, benchmark: Any, one_rank: None) -> None:
    state = large()
    into = blank(state)
    pending: list[Any] = []

    def ours() -> float:
        took = seconds(lambda: pending.append(pt214_dcp.async_save(state, tmp_path / "ours")))
        pending.pop().wait()
        return took

    def stock() -> float:
        path = fresh(tmp_path / "stock")
        took = seconds(lambda: pending.append(stock_async(state, path)))
        pending.pop().result()
        return took

    def copy() -> float:
        return seconds(lambda: [into[key].copy_(state[key]) for key in state])

    def overlapped() -> float:
        params = [torch.nn.Parameter(value, requires_grad=False) for value in state.values()]
        optimizer = torch.optim.SGD(params, lr=0.1)
        took = seconds(
            lambda: pending.append(
                pt214_dcp.async_save(state, tmp_path / "overlap", overlap=optimizer)
            )
        )
        pending.pop().wait()
        return took

    ARENA.release()
    pt214_dcp.prepare(state)
    first = ours()
    found = in_turns({"ours": ours, "memcpy": copy, "stock": stock})
    table = rows(f"blocked by a later save, {gib():g} GiB", "s", found)
    memcpy = found["memcpy"]
    table += rows("blocked by the first save", "s", {"ours": [first], "memcpy": memcpy[:1]})
    overlap = in_turns({"ours": overlapped, "memcpy": copy})
    table += rows("blocked with overlap", "s", overlap)
    into = blank(state)
    pt214_dcp.load(into, tmp_path / "overlap")
    check(state, into)
    report("dcp_blocked", table, benchmark)


def step_of(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    x = torch.randn(64, 256)

    def step() -> float:
        begin = time.perf_counter()
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    return step


def test_step(tmp_path: Path, benchmark: Any, one_rank: None) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the step has one of the cores, the save what is left
    state = small()
    net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
    step = step_of(net, torch.optim.AdamW(net.parameters()))
    for _ in range(20):
        step()

    def mean(begin: Callable[[], Callable[[], bool]]) -> float:
        done = begin()
        taken = []
        while not done() or len(taken) < 20:
            taken.append(step())
        return sum(taken) / len(taken)

    def idle() -> Callable[[], bool]:
        until = time.perf_counter() + 1.0
        return lambda: time.perf_counter() > until

    def ours() -> Callable[[], bool]:
        return pt214_dcp.async_save(state, tmp_path / "ours").done

    def stock() -> Callable[[], bool]:
        future = stock_async(state, fresh(tmp_path / "stock"))
        done: Callable[[], bool] = future.done
        return done

    pt214_dcp.save(state, tmp_path / "ours")
    found = in_turns(
        {"ours": lambda: mean(ours), "stock": lambda: mean(stock), "idle": lambda: mean(idle)}
    )
    torch.set_num_threads(threads)
    report("dcp_step", rows("a step during a save of 20,000 tensors", "s", found), benchmark)


MEMORY = """
import os, sys, threading, time
import torch, pt214_dcp
from pt214_dcp.engine import writer_process
count, budget, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
state = {f"w{at}": torch.ones(4 << 20) for at in range(count)}
pt214_dcp.save({"n": torch.ones(3)}, path)

def held():
    total = 0
    for pid in {os.getpid(), writer_process().child_pid}:
        for line in open(f"/proc/{pid}/smaps_rollup"):
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1024

before, peak, stop = held(), 0.0, threading.Event()
def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, held())
        time.sleep(0.01)
thread = threading.Thread(target=watch)
thread.start()
pt214_dcp.async_save(state, path, staging_bytes=budget).wait()
stop.set()
thread.join()
print(peak - before)
"""


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_memory(part: float, tmp_path: Path, benchmark: Any) -> None:
    count = int(gib() * 64)
    budget = int(part * count * (16 << 20))
    command = [sys.executable, "-W", "ignore", "-c", MEMORY, str(count), str(budget)]

    def peak() -> float:
        done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
        return float(done.stdout)

    figures = {"ours": [peak() for _ in range(min(3, rounds()))]}
    figures["budget"] = [budget / 2**20] * len(figures["ours"])
    case = f"memory above the state, budget {part:g} of it"
    report(f"dcp_memory_{part:g}", rows(case, "MiB", figures), benchmark)


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    """Stock's async_save wants a process group."""
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store"
    )
    yield
    torch.distributed.destroy_process_group()
