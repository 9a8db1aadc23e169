"""What one rank puts into the generation's folder, in the order that makes it durable.

    data written and fsynced - manifest, and the group's table by one rank of it, written and
    fsynced - folder fsynced - report

Only then may the rank say that it is done.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pt214_dcp import files
from pt214_dcp.agree import Agreement
from pt214_dcp.blocks import Written, checksum
from pt214_dcp.errors import SaveFailed
from pt214_dcp.feed import Feed
from pt214_dcp.file_plan import FilePlan, file_plan
from pt214_dcp.handle import SaveHandle
from pt214_dcp.incremental import Base, link_used
from pt214_dcp.layout import Held, whole_box
from pt214_dcp.manifest import Manifest, Own, data_name, manifest_name, pack_manifest
from pt214_dcp.plan import plan
from pt214_dcp.root import RankRecord, TableRecord
from pt214_dcp.stores.place import Where, make_folder, sync_folder, write_new
from pt214_dcp.structure import Structure
from pt214_dcp.table import Table, TensorRecord, pack_table, table_name

# What a full disk or a limit answers; the message then tells how much is needed.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TABLE = struct.Struct("<Q16s")
_KEPT_PLANS = 4  # of the last structures saved: a loop saves one or two


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank tells once its files are durable.

    Attributes:
        record: for the index.
        table: of its key group, if this rank wrote it.
    """

    record: RankRecord
    table: TableRecord | None

    def pack(self) -> bytes:
        """As long on every rank."""
        table = self.table or TableRecord(0, b"")
        return self.record.pack() + _TABLE.pack(table.size_bytes, table.digest)

    @staticmethod
    def unpack(data: bytes) -> Report:
        """Inverse of ``pack``."""
        size_bytes, digest = _TABLE.unpack(data[-_TABLE.size :])
        table = TableRecord(size_bytes, digest) if size_bytes else None
        return Report(RankRecord.unpack(data[: -_TABLE.size]), table)


@dataclass(frozen=True, slots=True)
class RankFiles:
    """One rank's files, all but what is known only once the data is written."""

    rank: int
    group: int
    plan: FilePlan
    table: Table | None  # on the rank that writes it
    own: tuple[Own, ...]
    own_tensors: tuple[torch.Tensor, ...]
    base: Base

    @staticmethod
    def of(
        structure: Structure, table: Table, agreement: Agreement, rank: int, base: Base
    ) -> RankFiles:
        """Plan what ``rank`` writes; a structure seen before costs nothing."""
        own_leaves = [leaf for item in structure.flat.own for leaf in item.leaves]
        own_records = tuple(
            TensorRecord(leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in own_leaves
        )
        seen = (structure.shape_digest, own_records, rank, agreement.members)
        own_keys = [f"{leaf.key}@{rank}" for leaf in own_leaves]
        return RankFiles(
            rank,
            agreement.group,
            _PLANS.get(seen, table, own_keys, own_records),
            table if rank == agreement.members[0] else None,
            tuple(Own(item.tree, len(item.leaves)) for item in structure.flat.own),
            tuple(leaf.tensor for leaf in own_leaves),
            base,
        )


class _Plans:
    """The last few plans: to plan 20,000 tensors costs more than to copy them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, FilePlan] = OrderedDict()

    def get(
        self, seen: Any, table: Table, own_keys: Sequence[str], own: Sequence[TensorRecord]
    ) -> FilePlan:
        with self._lock:
            if seen not in self._kept:
                self._kept[seen] = _plan(table, own_keys, own, seen[2])
                if len(self._kept) > _KEPT_PLANS:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(seen)
            return self._kept[seen]


_PLANS = _Plans()


def _plan(
    table: Table, own_keys: Sequence[str], own: Sequence[TensorRecord], rank: int
) -> FilePlan:
    parts = plan(table.items, rank)
    base = len(table.tensors)
    for at, record in enumerate(own):
        if 0 not in record.shape:
            box = whole_box(record.shape)
            parts.append((base + at, Held(box, box)))
    return file_plan([*table.keys, *own_keys], [*table.tensors, *own], parts)


def write_rank(folder: Where, rank_files: RankFiles, feed: Feed, handle: SaveHandle) -> Report:
    """Write and make durable what a rank has; ``folder`` is the generation's.

    Raises:
        SaveFailed: no room; the message has the bytes needed and free.
        OSError: what else the disk answers.
    """
    make_folder(folder)
    size_bytes = rank_files.plan.size_bytes
    known = rank_files.base.known
    valid = known is None
    if valid and isinstance(folder, Path):
        _check_room(folder, size_bytes)
    try:
        path = folder / data_name(rank_files.rank, valid=valid)
        written, data_bytes = feed.into(path, known)
        manifest = _manifest(rank_files, folder, written, data_bytes, valid=valid)
        packed = pack_manifest(manifest, rank_files.plan.columns)
        write_new(folder / manifest_name(rank_files.rank), packed, handle.check)
        table = None
        if rank_files.table is not None:
            data = pack_table(rank_files.table)
            write_new(folder / table_name(rank_files.group), data, handle.check)
            table = TableRecord(len(data), files.digest(data))
    except OSError as error:
        if isinstance(folder, Path) and error.errno in _NO_ROOM:
            raise _no_room(folder, size_bytes, error.errno or 0) from error
        raise
    sync_folder(folder)
    digest = files.digest(packed)
    record = RankRecord(len(packed), data_bytes, rank_files.group, digest)
    return Report(record, table)


def _manifest(
    rank_files: RankFiles, folder: Where, written: Written, data_bytes: int, *, valid: bool
) -> Manifest:
    """The manifest; the files that it leans on are linked into ``folder``."""
    header = rank_files.plan.header if valid else b""
    block_files, used = link_used(rank_files.base, folder, written.files)
    own = [TensorRecord(tensor.dtype, tuple(tensor.shape)) for tensor in rank_files.own_tensors]
    return Manifest(
        rank=rank_files.rank,
        group=rank_files.group,
        data_bytes=data_bytes,
        header_bytes=len(header),
        header_checksum=checksum(header),
        own=rank_files.own,
        own_tensors=tuple(own),
        chunks=(),
        checksums=written.checksums,
        block_files=None if valid else array("H", block_files),
        block_offsets=None if valid else written.offsets,
        files=used.names,
        hashes=bytes(written.hashes),
    )


def _check_room(folder: Path, needed_bytes: int) -> None:
    """Say before the first byte that a save can't fit; the old checkpoint stays meanwhile."""
    if _free_bytes(folder) < needed_bytes:
        raise _no_room(folder, needed_bytes, errno.ENOSPC)


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def _no_room(folder: Path, needed_bytes: int, code: int) -> SaveFailed:
    return SaveFailed(
        f"{folder}: {os.strerror(code)}: this rank needs {needed_bytes} bytes, "
        f"{_free_bytes(folder)} are free; what lay at the path before stays until a save is whole"
    )
