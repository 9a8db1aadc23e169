"""``torch.distributed.checkpoint.save(state, storage_writer=pt214_dcp.Writer(path))``.

torch plans and calls; what reaches the disk is an ordinary checkpoint of ours: each rank's chunks
in a file of its own, checksums, and a root that is renamed into place last. torch's planning costs
what it costs; ``pt214_dcp.save`` has none of it.

    coordinator  prepare_global_plan   numbers the tensors, names the generation
    each rank    write_data            data and manifest, durable; its report goes back
    coordinator  finish                table, index, rename
"""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from pt214_dcp import commit, files
from pt214_dcp.errors import NotData, SaveFailed
from pt214_dcp.exchange import TIMEOUT_S
from pt214_dcp.feed import feed_of
from pt214_dcp.file_plan import file_plan
from pt214_dcp.handle import SaveHandle
from pt214_dcp.incremental import Base
from pt214_dcp.interop.stock_paths import tree_of
from pt214_dcp.layout import Box, Held, Layout, Mesh, whole_box
from pt214_dcp.options import SaveOptions
from pt214_dcp.rank_files import RankFiles, Report, write_rank
from pt214_dcp.root import TableRecord
from pt214_dcp.state import take_apart
from pt214_dcp.table import Table, TensorRecord, pack_table, table_name
from pt214_dcp.trees import Json, join, renumbered

_Results = list[WriteResult]
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_UNUSED = TensorRecord(torch.uint8, (0,))
_REPORT = MetadataIndex("\0 pt214 report")  # a name that no tensor has


@dataclasses.dataclass(frozen=True)
class _Note:
    """What the coordinator tells each rank.

    Attributes:
        uuid: of the save.
        rank: number of the plan.
        names: of all tensors, in the order of their numbers.
        records: what each is.
    """

    uuid: str
    rank: int
    world_size: int
    names: tuple[str, ...]
    records: tuple[tuple[torch.dtype, tuple[int, ...]], ...]


class _Inside(NamedTuple):
    """A tensor inside a value that torch does not flatten, such as a tuple's.

    Attributes:
        number: in the table, after those that torch knows: one place in each row for each rank.
        suffix: of its key, behind the value's.
        record: dtype and shape.
    """

    number: int
    suffix: str
    record: TensorRecord


class _Value(NamedTuple):
    """A value that torch would pickle, as the rank that writes it tells of it."""

    tree: Json
    inside: list[_Inside]


class Writer(StorageWriter):
    """Storage for ``torch.distributed.checkpoint`` that writes a pt214 checkpoint.

    Args:
        path: folder of the checkpoint; what lies there stays until the new one is whole.

    Values that are no tensors must be data, as for ``pt214_dcp.save``: no pickle is written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path).absolute()
        self._values: dict[str, Json] = {}
        self._note: _Note | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, at another path if one is given."""
        if checkpoint_id:
            self.path = Path(checkpoint_id).absolute()
        self._values, self._note = {}, None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def storage_meta(self) -> StorageMeta | None:
        """Where, for torch's records."""
        return StorageMeta(checkpoint_id=str(self.path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return "://" not in os.fspath(checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the tensors of all ranks, and name the generation."""
        records: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for plan in plans:
            for item in plan.items:
                if item.tensor_data is not None:
                    data = item.tensor_data
                    records[item.index.fqn] = (data.properties.dtype, tuple(data.size))
        names = tuple(sorted(records))
        name = uuid.uuid4().hex
        rows = tuple(records[each] for each in names)
        return [
            dataclasses.replace(plan, storage_data=_Note(name, rank, len(plans), names, rows))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[_Results]:
        """Write this rank's items, durably."""
        note: _Note = plan.storage_data
        self._note = note
        number = {name: at for at, name in enumerate(note.names)}
        parts, tensors = [], {}
        values: dict[str, _Value] = {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                before = sum(len(value.inside) for value in values.values())
                values[item.index.fqn], found = _value(planner, item, note, before)
                for each, leaf in zip(values[item.index.fqn].inside, found, strict=True):
                    box = whole_box(each.record.shape)
                    parts.append((each.number, box))
                    tensors[each.number, box] = leaf
                continue
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            parts.append((number[item.index.fqn], box))
            tensors[number[item.index.fqn], box] = tensor.detach()
        report = self._write(note, values, parts, tensors)
        future: Future[_Results] = Future()
        results = [WriteResult(item.index, 0, None) for item in plan.items]
        told = (note.rank, report.pack(), values)
        results.append(WriteResult(_REPORT, 0, told))
        future.set_result(results)
        return future

    def _write(
        self, note: _Note, values: Mapping[str, _Value], parts: Sequence[tuple[int, Box]],
        tensors: dict[Any, torch.Tensor],
    ) -> Report:  # fmt: skip
        keys, records = _numbered(note, list(note.names), values)
        placed = [(at, Held(box, Box((0,) * len(box.size), box.size))) for at, box in parts]
        laid = file_plan(keys, records, placed)
        # The plan names parts by tensor; two parts of one tensor are two tensors here.
        ordered = [tensors[part.tensor, part.held.box] for part in laid.parts]
        numbered = dataclasses.replace(
            laid, parts=tuple(part._replace(tensor=at) for at, part in enumerate(laid.parts))
        )
        handle = SaveHandle(str(self.path), time.monotonic(), laid.size_bytes)
        feed = feed_of(numbered, ordered, SaveOptions(), True, handle)
        rank_files = RankFiles(note.rank, 0, laid, None, (), (), Base())
        folder = self.path / f"gen-{note.uuid}"
        try:
            feed.fill()
            return write_rank(folder, rank_files, feed, handle)
        finally:
            feed.drain()

    def finish(self, metadata: Metadata, results: list[_Results]) -> None:
        """Write the table and the index, and commit."""
        note = self._note
        assert note is not None
        reports, values = {}, dict[str, _Value]()
        for rows in results:
            for row in rows:
                if row.index == _REPORT:
                    rank, packed, told = row.storage_data
                    reports[rank] = Report.unpack(packed)
                    values.update(told)
        if len(reports) != note.world_size:
            raise SaveFailed(f"{self.path}: {len(reports)} of {note.world_size} ranks reported")
        folder = self.path / f"gen-{note.uuid}"
        data = pack_table(_table(note, metadata, values))
        files.write_new(folder / table_name(0), data, lambda: None)
        table = TableRecord(len(data), files.digest(data))
        reports[0] = Report(reports[0].record, table)
        previous = commit.committed(self.path)
        commit.commit(self.path, folder.name, reports, commit.seen(self.path))
        commit.remove_old(self.path, previous, stale_s=2 * TIMEOUT_S)


def _value(
    planner: SavePlanner, item: WriteItem, note: _Note, before: int
) -> tuple[_Value, list[torch.Tensor]]:
    """A value that torch would pickle, and the tensors in it; ``before`` it are so many others."""
    name = item.index.fqn
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise NotData(
            f"{name}: planner {type(planner).__name__} hands out pickled bytes only; use torch's "
            "DefaultSavePlanner"
        )
    flat = take_apart({name: lookup(item.index)})
    if flat.own:
        raise NotData(f"{flat.own[0].key}: PerRank is for pt214_dcp.save; torch keeps one value")
    prefix = join("", name)
    inside = []
    for at, (key, tensor) in enumerate(flat.leaves, start=before):
        if type(tensor).__name__ == "DTensor":
            raise NotData(f"{key}: a DTensor inside a value that torch does not flatten")
        number = len(note.names) + at * note.world_size + note.rank
        record = TensorRecord(tensor.dtype, tuple(tensor.shape))
        inside.append(_Inside(number, key.removeprefix(prefix), record))
    tree = renumbered(flat.tree["dict"][0][1], [each.number for each in inside])
    return _Value(tree, inside), [leaf.tensor.detach() for leaf in flat.leaves]


def _numbered(
    note: _Note, keys: list[str], values: Mapping[str, _Value], names: Mapping[str, str] = _NO_NAMES
) -> tuple[tuple[str, ...], tuple[TensorRecord, ...]]:
    """Key and record of each number of the table; a number that no rank used has an empty key."""
    records = [TensorRecord(dtype, shape) for dtype, shape in note.records]
    inside = {
        each.number: (names.get(name, name) + each.suffix, each.record)
        for name, value in values.items()
        for each in value.inside
    }
    for number in range(len(records), max(inside, default=-1) + 1):
        key, record = inside.get(number, ("", _UNUSED))
        keys.append(key)
        records.append(record)
    return tuple(keys), tuple(records)


def _table(note: _Note, metadata: Metadata, values: Mapping[str, _Value]) -> Table:
    """Said to be on all ranks, since torch keeps no layouts; the manifests know better."""
    paths = metadata.planner_data or {}
    leaves = {
        tuple(paths.get(name, (name,))): {"tensor": at} for at, name in enumerate(note.names)
    } | {tuple(paths.get(name, (name,))): value.tree for name, value in values.items()}
    everyone = Layout(Mesh((note.world_size,), tuple(range(note.world_size))), (None,))
    names = {name: _key(tuple(paths.get(name, (name,)))) for name in (*note.names, *values)}
    keys, records = _numbered(note, [names[name] for name in note.names], values, names)
    count = len(keys)
    return Table(tree_of(leaves), keys, records, (everyone,) * count, (None,) * count, {})


def _key(path: tuple[str | int, ...]) -> str:
    key = ""
    for each in path:
        key = join(key, each)
    return key
