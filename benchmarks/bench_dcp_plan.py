"""What does planning cost a rank, a root and a loader, at 64, 1,024 and 4,096 ranks?

No process is started: layouts of a mesh of that many ranks are planned for one of them, 300 tensors
of which 30 are replicated, as one transformer rank has them. ``plan`` is who writes what;
``layouts`` makes them from real DTensor specs. ``root`` is everything that rank 0 does more than
the others: the index and COMMIT.json. ``load`` reads the records that the same rank needs of a
checkpoint of that many ranks, and ``reshard`` finds one tensor for a loader on another layout.
Stock's figures are for its coordinator: DefaultSavePlanner's plans of all ranks, made global.
"""

from __future__ import annotations

import pickle
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import Row, report, rounds, row, seconds
from pt214_dcp import files
from pt214_dcp.checkpoint import Checkpoint, open_checkpoint
from pt214_dcp.compat import Layouts
from pt214_dcp.file_plan import file_plan
from pt214_dcp.find import Finder
from pt214_dcp.layout import Box, Item, Layout, Mesh, Split
from pt214_dcp.manifest import Manifest, block_sizes, manifest_name, pack_manifest
from pt214_dcp.plan import plan
from pt214_dcp.root import (
    COMMIT,
    INDEX,
    Commit,
    RankRecord,
    TableRecord,
    pack_commit,
    pack_index,
)
from pt214_dcp.table import Table, TensorRecord, pack_table, table_name
from torch.distributed.tensor import Replicate, Shard

WORLDS = (64, 1024, 4096)
STOCK_UP_TO = 64  # its coordinator takes minutes beyond
TENSORS = 300


def shape_of(at: int) -> tuple[int, ...]:
    return (1024,) if at % 10 == 0 else (8192, 1024)


def key_of(at: int) -> str:
    return f"model.layers.{at // 9}.block.weight{at % 9}"


def items(world: int) -> list[Item]:
    mesh = Mesh((world,), tuple(range(world)))
    sharded, whole = Layout(mesh, (Split(0),)), Layout(mesh, (None,))
    return [
        Item(key_of(at), 4, shape_of(at), whole if at % 10 == 0 else sharded)
        for at in range(TENSORS)
    ]


def table_of(world: int) -> Table:
    planned = items(world)
    records = tuple(TensorRecord(torch.float32, item.shape) for item in planned)
    tree = {"dict": [[item.key, {"tensor": at}] for at, item in enumerate(planned)]}
    layouts = tuple(item.layout for item in planned)
    keys = tuple(item.key for item in planned)
    return Table(tree, keys, records, layouts, (None,) * TENSORS, {})


def median_ms(call: Any) -> float:
    return 1e3 * statistics.median(seconds(call) for _ in range(max(9, rounds())))


def specs(world: int) -> list[Any]:
    """What ``Layouts`` reads of a DTensor: its class name, mesh and placements."""
    mesh = SimpleNamespace(mesh=torch.arange(world), shape=(world,))
    kind = type("DTensor", (torch.Tensor,), {})
    found = []
    for at in range(TENSORS):
        tensor = torch.empty(0).as_subclass(kind)
        placements = (Replicate(),) if at % 10 == 0 else (Shard(0),)
        tensor._spec = SimpleNamespace(mesh=mesh, placements=placements)
        found.append(tensor)
    return found


def write_checkpoint(path: Path, world: int) -> None:
    """Records of a checkpoint of ``world`` ranks; the data files are not needed to plan a load."""
    table = table_of(world)
    folder = path / ("gen-" + "0" * 32)
    folder.mkdir(parents=True)
    packed = pack_table(table)
    (folder / table_name(0)).write_bytes(packed)
    records = []
    for rank in range(world):
        laid = file_plan(table.keys, table.tensors, plan(table.items, rank))
        sizes = block_sizes(part.size_bytes for part in laid.parts)
        size = len(laid.header) + laid.size_bytes
        manifest = Manifest(
            rank, 0, size, len(laid.header), 0, (), (), (), sizes, None, None, (), b""
        )
        data = pack_manifest(manifest, laid.columns)
        (folder / manifest_name(rank)).write_bytes(data)
        records.append(RankRecord(len(data), size, 0, files.digest(data)))
    index, pages = pack_index(records)
    (folder / INDEX).write_bytes(index)
    tables = (TableRecord(len(packed), files.digest(packed)),)
    (path / COMMIT).write_bytes(pack_commit(Commit(folder.name, world, tables, pages, 0)))


def load_records(path: Path, rank: int) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    checkpoint.manifest(rank)
    return checkpoint


def reshard(path: Path, world: int) -> int:
    """Find the rows of one tensor for a loader on 3 ranks."""
    finder = Finder(open_checkpoint(path), 0, world)
    found = finder.find(11, Box((100, 0), (8192 // 3, 1024)))
    assert sum(item.part.numel for item in found) == 8192 // 3 * 1024
    return len(found)


def stock_plan_ms(world: int) -> float:
    """Stock's coordinator: unpickle the plans of all ranks, make them global, pickle them again."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    local = []
    for rank in range(world):
        state = {f"{key_of(at)}.{rank}": torch.empty(8, 8, device="meta") for at in range(TENSORS)}
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=rank == 0)
        local.append(pickle.dumps(planner.create_local_plan()))
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    planner.set_up_planner({}, is_coordinator=True)

    def coordinate() -> None:
        plans = [pickle.loads(data) for data in local]
        made, metadata = planner.create_global_plan(plans)
        pickle.dumps(made)
        pickle.dumps(metadata)

    return 1e3 * seconds(coordinate)


def measured(world: int, path: Path) -> list[Row]:
    """All rows of one number of ranks."""
    planned, table, tensors, rank = items(world), table_of(world), specs(world), world // 2
    parts = plan(planned, rank)
    records = [RankRecord(9000, 1 << 30, 0, bytes(16))] * world

    def layouts() -> None:
        made = Layouts(range(world))
        for at, tensor in enumerate(tensors):
            assert made.of(str(at), tensor) is not None

    def root() -> None:
        _, pages = pack_index(records)
        pack_commit(Commit("gen-" + "0" * 32, world, (TableRecord(1, bytes(16)),), pages, 0))

    found = [row(f"plan, {world} ranks", "ms", median_ms(lambda: plan(planned, rank)), 5)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pt214_dcp.compat.is_dtensor", lambda tensor: True)
        found.append(row(f"layouts, {world} ranks", "ms", median_ms(layouts), 5))
    took = median_ms(lambda: file_plan(table.keys, table.tensors, parts))
    found.append(row(f"file plan, once a structure, {world} ranks", "ms", took, 20))
    took = median_ms(root)
    found.append(row(f"root, {world} ranks", "ms", took, 200))
    if world <= STOCK_UP_TO:
        case = f"root beside stock's coordinator, {world} ranks"
        found.append(row(case, "ms", took, stock_plan_ms(world), "stock"))
    write_checkpoint(path, world)
    took = median_ms(lambda: load_records(path, rank))
    found.append(row(f"load the records of a rank, {world} ranks", "ms", took, 20))
    read = load_records(path, rank).read_bytes + (path / COMMIT).stat().st_size
    found.append(row(f"bytes of records of a rank, {world} ranks", "B", read, 50_000))
    took = median_ms(lambda: reshard(path, world))
    found.append(row(f"find one tensor for another layout, {world} ranks", "ms", took, 200))
    return found


def test_planning(tmp_path: Path, benchmark: Any) -> None:
    found = [each for world in WORLDS for each in measured(world, tmp_path / str(world))]
    report("dcp_plan", found, benchmark)
