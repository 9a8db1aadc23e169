"""Run a function on several gloo ranks: spawned once, given many cases, killed if they hang."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first DTensor imports it: once here, not once a rank
import torch.distributed as dist
import torch.distributed.tensor  # seconds: once here, not once a rank

DEADLINE_S = 100.0


def _main(call: Callable[..., None], rank: int, size: int, store: str, args: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
        call(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        Path(f"{store}.error.{rank}").write_text(traceback.format_exc())
        os._exit(1)


def begin(folder: Path, size: int, call: Callable[..., None], *args: Any) -> list[BaseProcess]:
    """Start ``size`` ranks that call ``call(rank, *args)``; the caller ends them."""
    spawn = multiprocessing.get_context("fork")  # torch is loaded once, not once a rank
    store = folder / f"store-{time.monotonic_ns()}"
    found: list[BaseProcess] = []
    for rank in range(size):
        process = spawn.Process(target=_main, args=(call, rank, size, str(store), args))
        with warnings.catch_warnings():  # Python 3.12 warns of threads; the child uses none of ours
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        found.append(process)
    return found


def run(folder: Path, size: int, call: Callable[..., None], *args: Any) -> None:
    """Run ``call(rank, *args)`` on ``size`` ranks, and fail with what any of them raised."""
    processes = begin(folder, size, call, *args)
    until = time.monotonic() + DEADLINE_S
    try:
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        errors = [path.read_text() for path in sorted(folder.glob("store-*.error.*"))]
        codes = [process.exitcode for process in processes]
        assert codes == [0] * size, f"{codes}\n" + "\n".join(errors)
    finally:
        end(processes)


def end(processes: list[BaseProcess]) -> None:
    """Kill what still runs, and wait for all."""
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., None]:
    """``run_ranks(size, call, *args)`` runs ``call(rank, *args)`` on gloo ranks."""
    return partial(run, tmp_path)


@pytest.fixture
def begin_ranks(tmp_path: Path) -> Iterator[Callable[..., list[BaseProcess]]]:
    """As ``run_ranks``, but returns the running processes; what still runs is killed at the end."""
    begun: list[BaseProcess] = []

    def call(size: int, function: Callable[..., None], *args: Any) -> list[BaseProcess]:
        processes = begin(tmp_path, size, function, *args)
        begun.extend(processes)
        return processes

    yield call
    end(begun)


@pytest.fixture
def peak() -> Callable[[Callable[[], object]], int]:
    """``peak(call)`` is the most memory of Python objects, in bytes, while ``call`` runs."""

    def measured(call: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measured
