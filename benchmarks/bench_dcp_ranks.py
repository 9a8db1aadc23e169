"""Does a save's time grow with ranks? Eight gloo ranks of 300 tiny tensors, and writers in step.

``ranks``: a save of 300 tensors of 1 KiB each a rank, from the first rank's call to the last one's
return; stock's ``dcp.save`` in the same processes, in turns. ``writers``: 1, 2, 4 and 8 processes
whose writes are each held to 50 MB/s by a token bucket in front of ``pwritev``, saving 50 MB each:
the rate that they reach together, over N times 50 MB/s.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pt214_dcp
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock_dcp
from harness import report, rounds, row
from pt214_dcp import blocks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RATE = 50e6
WRITERS = (1, 2, 4, 8)


def spawn(size: int, call: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """Run ``call(rank, folder, *args)`` on gloo ranks; what each returned."""
    context = multiprocessing.get_context("fork")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", rank=rank, world_size=size, init_method=f"file://{folder}/store"
        )
        (folder / f"answer-{rank}").write_text(json.dumps(call(rank, folder, *args)))
        dist.destroy_process_group()

    ranks = [context.Process(target=main, args=(rank,)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    return [json.loads((folder / f"answer-{rank}").read_text()) for rank in range(size)]


def tiny(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    return {
        f"w{at}": DTensor.from_local(torch.full((256,), float(rank)), mesh, [Shard(0)])
        for at in range(300)
    }


def save_tiny(rank: int, folder: Path) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    state = tiny(rank, dist.get_world_size())
    found: dict[str, list[float]] = {"ours": [], "stock": []}
    for turn in range(rounds() + 1):
        for name in ("ours", "stock"):
            path = folder / f"{name}-{turn}"
            dist.barrier()
            begin = time.perf_counter()
            if name == "ours":
                pt214_dcp.save(state, path)
            else:
                stock_dcp.save(state, checkpoint_id=path)
            dist.barrier()
            if turn:  # the first turn warms both
                found[name].append(time.perf_counter() - begin)
    into = tiny(rank, dist.get_world_size())
    for value in into.values():
        value.to_local().zero_()
    pt214_dcp.load(into, folder / f"ours-{rounds()}")
    assert all(bool((value.to_local() == rank).all()) for value in into.values())
    return found


def throttled(rank: int, folder: Path, size_bytes: int) -> float:
    """Seconds of one save with writes held to ``RATE``."""
    write = blocks._write_slice
    begin = time.perf_counter()
    written = 0

    def slowly(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        nonlocal written
        written += sum(map(len, buffers))
        ended = write(fd, buffers, at)
        time.sleep(max(0.0, begin + written / RATE - time.perf_counter()))
        return ended

    setattr(blocks, "_write_slice", slowly)  # noqa: B010
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    local = torch.full((1, size_bytes // 4), float(rank))
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)])}
    dist.barrier()
    begin = time.perf_counter()
    pt214_dcp.save(state, folder / "c")
    dist.barrier()
    return time.perf_counter() - begin


def slow_disks(folder: Path) -> Path:
    """Memory, if there is a file system of it: this machine's one disk must not be the limit."""
    memory = Path("/dev/shm")
    return memory / f"pt214-bench-{os.getpid()}" if os.access(memory, os.W_OK) else folder


def test_ranks(tmp_path: Path, benchmark: Any) -> None:
    found, ours = [], {}
    for size in (1, 8):
        figures = spawn(size, save_tiny, tmp_path / f"tiny-{size}")[0]
        ours[size], stock = (statistics.median(figures[name]) for name in ("ours", "stock"))
        case = f"save of 300 tiny tensors a rank, {size} ranks"
        found.append(row(case, "s", ours[size], stock, "stock", stock / ours[size]))
    found.append(row("8 ranks, beside one", "s", ours[8], ours[1], "ours alone", ours[1] / ours[8]))
    for size in WRITERS:
        size_bytes = 50_000_000
        took = max(spawn(size, throttled, slow_disks(tmp_path) / f"writers-{size}", size_bytes))
        rate = size * size_bytes / took
        ideal = size * RATE
        case = f"{size} writers of 50 MB/s each"
        found.append(row(case, "MB/s", rate / 1e6, ideal / 1e6, "N times 50", rate / ideal))
    shutil.rmtree(slow_disks(tmp_path), ignore_errors=True)
    report("dcp_ranks", found, benchmark)
