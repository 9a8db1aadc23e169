"""``torch.distributed.checkpoint.load(state, storage_reader=pt214_dcp.Reader(path))``.

torch plans which part of which tensor each rank wants; those parts are read from a checkpoint of
ours, straight from their blocks and checked. Values are handed over in the pickled form that
torch's planners expect; that pickle is made here, in memory, from data: none is read.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from pt214_dcp import state
from pt214_dcp.checkpoint import Checkpoint, open_checkpoint
from pt214_dcp.data_files import DataFiles
from pt214_dcp.errors import LoadFailed, StateMismatch
from pt214_dcp.find import Finder
from pt214_dcp.interop.stock_paths import names_of
from pt214_dcp.layout import Box
from pt214_dcp.loader import plan_box
from pt214_dcp.reader import read_tensor
from pt214_dcp.reads import Reads
from pt214_dcp.table import TensorRecord
from pt214_dcp.trees import Json


class Reader(StorageReader):
    """Storage for ``torch.distributed.checkpoint`` that reads a pt214 checkpoint.

    Args:
        path: folder of the checkpoint, of one key group.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path).absolute()
        self._checkpoint: Checkpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from another path if one is given."""
        if checkpoint_id:
            self.path = Path(checkpoint_id).absolute()
        self._checkpoint = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return "://" not in os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What torch wants to know: every name with its kind.

        Raises:
            NotACheckpoint: nothing is committed there.
            LoadFailed: it has several key groups, which torch's names can't tell apart.
        """
        checkpoint = self._open()
        table = checkpoint.table(0)
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        paths = {}
        for name, (path, tree) in names_of(table.tree).items():
            paths[name] = path
            if isinstance(tree, dict) and "tensor" in tree:
                found[name] = _described(table.tensors[tree["tensor"]])
            else:
                found[name] = BytesStorageMetadata()
        return Metadata(found, planner_data=paths, storage_data={}, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan."""
        checkpoint = self._open()
        table = checkpoint.table(0)
        names = names_of(table.tree)
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        with DataFiles(checkpoint) as data:
            reads, finder = Reads(data), Finder(checkpoint, 0, 0)
            for item in plan.items:
                _, tree = names[item.storage_index.fqn]
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled(checkpoint, tree))
                    continue
                into = planner.resolve_tensor(item).detach()
                stored = table.tensors[tree["tensor"]].dtype
                if into.dtype != stored:
                    name = item.storage_index.fqn
                    told = f"{name}: checkpoint has dtype {stored}, state dict has {into.dtype}"
                    raise StateMismatch(str(self.path), (), (), (told,))
                targets.append((item, into))
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                if 0 not in box.size:
                    key = table.keys[tree["tensor"]]
                    plan_box(table, finder, key, box, into.view(box.size), reads)
            reads.run()
        for item, into in targets:
            planner.commit_tensor(item, into)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self.path)
            if len(self._checkpoint.commit.tables) > 1:
                raise LoadFailed(f"{self.path}: several key groups; load it with pt214_dcp.load")
        return self._checkpoint


def _described(record: TensorRecord) -> TensorStorageMetadata:
    size = torch.Size(record.shape)
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=record.dtype), size, [chunk])


def _pickled(checkpoint: Checkpoint, tree: Json) -> io.BytesIO:
    """A value in the form that torch's planners unpickle."""
    table = checkpoint.table(0)
    wanted = sorted(_numbers(tree))
    tensors = {at: read_tensor(checkpoint, table.keys[at]) for at in wanted}
    dense = [tensors.get(at) for at in range(max(wanted, default=-1) + 1)]
    stream = io.BytesIO()
    torch.save(state.build(tree, dense), stream)
    stream.seek(0)
    return stream


def _numbers(tree: Json) -> set[int]:
    """Numbers of the tensors and arrays in a value."""
    if isinstance(tree, dict):
        kind, below = next(iter(tree.items()))
        if kind in ("tensor", "numpy"):
            return {below}
        if kind == "dict":
            return set().union(*(_numbers(item) for _, item in below))
        if kind in ("list", "tuple"):
            return set().union(*map(_numbers, below))
    return set()
