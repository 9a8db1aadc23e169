"""What does a step write if little changed, what does a load on other ranks read, and what do
checksums cost?

``written``: bytes of an incremental save after a tenth of the blocks changed, over those of a full
one. ``read``: bytes of data read on all ranks over the bytes that they need, for loads on another
number of ranks and on other meshes. ``checksums``: the save of ``PT214_BENCH_GIB`` GiB with and
without checksums, in turns.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pt214_dcp
import torch
import torch.distributed as dist
from bench_dcp_ranks import spawn
from bench_dcp_save import blank, check, fresh, large
from harness import Row, gib, in_turns, report, row, rows, seconds
from pt214_dcp import blocks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

MIB = 1 << 20
SHAPE = (1 << 14, 1 << 12)  # 256 MiB
# Saved on, loaded on: mesh and the dims that its axes cut (None for replicas).
MOVES = {
    "rows, 4 to 3 ranks": (((4,), (0,)), ((3,), (0,))),
    "rows, 3 to 4 ranks": (((3,), (0,)), ((4,), (0,))),
    "rows, 8 to 2 ranks": (((8,), (0,)), ((2,), (0,))),
    "rows with replicas, 2x2 to 3 ranks": (((2, 2), (None, 0)), ((3,), (0,))),
    "rows cut twice, 2x2 to 4 ranks": (((2, 2), (0, 0)), ((4,), (0,))),
    "columns, 4 to 2 ranks": (((4,), (1,)), ((2,), (1,))),
    "rows and columns, 2x2 to 4 ranks of rows": (((2, 2), (0, 1)), ((4,), (0,))),
}


def tensor(layout: Any, value: torch.Tensor) -> Any:
    mesh, dims = layout
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    return distribute_tensor(value, init_device_mesh("cpu", mesh), placements, src_data_rank=None)


def whole() -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int32).view(SHAPE)


def save(rank: int, folder: Path, layout: Any) -> None:
    pt214_dcp.save({"w": tensor(layout, whole())}, folder.parent / "c")


def load(rank: int, folder: Path, layout: Any) -> list[int]:
    into = tensor(layout, torch.zeros(SHAPE, dtype=torch.int32))
    read = pt214_dcp.load({"w": into}, folder.parent / "c").size_bytes
    assert torch.equal(into.to_local(), tensor(layout, whole()).to_local())
    return [read, into.to_local().numel() * 4]


def test_bytes_read(tmp_path: Path, benchmark: Any) -> None:
    found: list[Row] = []
    for case, (before, after) in MOVES.items():
        for layout, call in ((before, save), (after, load)):
            size = torch.Size(layout[0]).numel()
            answers = spawn(size, call, tmp_path / "ranks", layout)
        read, needed = map(sum, zip(*answers, strict=True))
        found.append(row(f"bytes read: {case}", "B", read, needed, "needed"))
        shutil.rmtree(tmp_path / "c")
    report("dcp_bytes_read", found, benchmark)
    assert not dist.is_initialized()


def test_incremental(tmp_path: Path, benchmark: Any) -> None:
    state = {f"w{at}": torch.randn(4 * MIB) for at in range(20)}
    full = pt214_dcp.save(state, tmp_path / "0", hashes=True).size_bytes
    for at in (3, 11):
        state[f"w{at}"].add_(1)
    part = pt214_dcp.save(state, tmp_path / "1", base=tmp_path / "0").size_bytes
    assert full
    assert part
    into = blank(state)
    pt214_dcp.load(into, tmp_path / "1")
    check(state, into)
    found = [row("bytes written after a tenth changed", "B", part, full, "a full save")]
    report("dcp_incremental", found, benchmark)


def test_checksums(tmp_path: Path, benchmark: Any) -> None:
    state, checksum = large(), blocks.checksum

    def without() -> float:
        setattr(blocks, "checksum", len)  # noqa: B010
        try:
            return seconds(lambda: pt214_dcp.save(state, fresh(tmp_path / "blind")))
        finally:
            blocks.checksum = checksum

    figures = in_turns(
        {
            "ours": lambda: seconds(lambda: pt214_dcp.save(state, fresh(tmp_path / "ours"))),
            "without checksums": without,
        }
    )
    report("dcp_checksums", rows(f"save with checksums, {gib():g} GiB", "s", figures), benchmark)
