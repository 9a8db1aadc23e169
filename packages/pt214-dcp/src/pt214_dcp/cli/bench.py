"""``bench``: what does this disk give, and how much of it do save and load reach?"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pt214_dcp.api import async_save, load, prepare, save
from pt214_dcp.arena import memory
from pt214_dcp.cli.answer import Answer, Command, shown
from pt214_dcp.errors import BadOption

_PIECE = 16 << 20


def run_bench(arguments: argparse.Namespace) -> Answer:
    """Raw writes and reads in turns with save, async_save and load."""
    if arguments.mib < 16 or arguments.rounds < 1:
        raise BadOption(
            f"--mib is {arguments.mib} and --rounds {arguments.rounds}; at least 16 and 1"
        )
    count = arguments.mib * (1 << 20) // _PIECE
    state = {f"w{at}": torch.randn(_PIECE // 4) for at in range(count)}
    size = count * _PIECE
    folder = Path(tempfile.mkdtemp(prefix="pt214-bench-", dir=arguments.path))
    try:
        taken = _turns(state, folder, arguments)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    facts = {
        "size_bytes": size,
        "rounds": arguments.rounds,
        "seconds": medians,
        "save_over_raw": medians["save"] / medians["raw write"],
        "load_over_raw": medians["load"] / medians["raw read"],
        "blocked_over_copy": medians["async_save, blocked"] / medians["copy in memory"],
    }
    lines = [f"{name:>22}: {s:7.3f} s  {size / s / 1e6:8.0f} MB/s" for name, s in medians.items()]
    lines += [f"{name}: {facts[name]:.2f}" for name in facts if "_over_" in name]
    return Answer(facts, lines)


def _turns(
    state: dict[str, torch.Tensor], folder: Path, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    into = {key: torch.zeros_like(value) for key, value in state.items()}
    prepare(state)

    def asynchronous() -> float:
        handle = async_save(state, folder / "c")
        handle.wait()
        return handle.blocked_s

    calls: dict[str, Callable[[], object]] = {
        "raw write": lambda: _raw_write(state, folder / "raw"),
        "save": lambda: save(state, folder / "c"),
        "raw read": lambda: _raw_read(into, folder / "raw"),
        "load": lambda: load(into, folder / "c"),
        "copy in memory": lambda: [into[key].copy_(state[key]) for key in state],
        "async_save, blocked": asynchronous,
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    with shown(arguments, "bench") as told:
        for turn in range(arguments.rounds):
            for number, (name, call) in enumerate(calls.items()):
                begin = time.perf_counter()
                measured = call()
                took = time.perf_counter() - begin
                taken[name].append(measured if isinstance(measured, float) else took)
                if told is not None:
                    told(turn * len(calls) + number + 1, arguments.rounds * len(calls))
    _hold_bits(state, into, folder / "c")
    return taken


def _hold_bits(state: dict[str, torch.Tensor], into: dict[str, torch.Tensor], path: Path) -> None:
    """Times of a save or load that does nothing are worth nothing."""
    for tensor in into.values():
        tensor.zero_()
    load(into, path)
    wrong = [key for key in state if not torch.equal(state[key], into[key])]
    if wrong:
        raise OSError(f"{path}: load gave other bits than were saved in {wrong}; no times are told")


def _raw_write(state: dict[str, torch.Tensor], path: Path) -> None:
    path.unlink(missing_ok=True)
    fd, at = os.open(path, os.O_WRONLY | os.O_CREAT), 0
    for tensor in state.values():
        at += os.pwrite(fd, memory(tensor), at)
    os.fsync(fd)
    os.close(fd)


def _raw_read(into: dict[str, torch.Tensor], path: Path) -> None:
    fd, at = os.open(path, os.O_RDONLY), 0
    for tensor in into.values():
        at += os.preadv(fd, [memory(tensor)], at)
    os.close(fd)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--mib", type=int, default=512, help="of the state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")


BENCH = Command("measure this disk against save and load", _add_bench, run_bench)
