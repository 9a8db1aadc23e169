"""Write a checkpoint anew from one process: as it was, or as another number of ranks would have.

The work of ``compact`` and ``reshard``. One part of one tensor is in memory at a time; what lies at
the target stays until the new generation is whole, as with any save.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pt214_dcp import commit, leftovers
from pt214_dcp.arena import memory
from pt214_dcp.blocks import Known, Written
from pt214_dcp.checkpoint import Checkpoint, open_checkpoint
from pt214_dcp.data_files import DataFiles
from pt214_dcp.engine import ThreadWriter
from pt214_dcp.errors import BadOption, CheckpointError
from pt214_dcp.file_plan import FilePlan, file_plan
from pt214_dcp.find import Finder
from pt214_dcp.handle import SaveHandle
from pt214_dcp.incremental import Base
from pt214_dcp.layout import Box, Held, Layout, Mesh, Split
from pt214_dcp.loader import plan_box
from pt214_dcp.manifest import BLOCK_BYTES, Manifest, Own
from pt214_dcp.plan import plan
from pt214_dcp.progress import Told, meter_of
from pt214_dcp.rank_files import RankFiles, write_rank
from pt214_dcp.reads import Reads
from pt214_dcp.repair import QUIET_S
from pt214_dcp.stores.place import Where
from pt214_dcp.table import Table, TensorRecord

Read = Callable[[int, Box, torch.Tensor, Reads], None]  # tensor, part, where to, reads to add to


def rewrite(
    source: Path,
    target: Path,
    *,
    ranks: int | None = None,
    hashes: bool = False,
    progress: Told | None = None,
) -> None:
    """Read the checkpoint at ``source`` and commit it at ``target``, which may be the same.

    Args:
        source: folder of a checkpoint.
        target: folder of the new one.
        ranks: write so many ranks' files, tensors cut by rows; None writes the ranks there were.
        hashes: so that the new checkpoint can be a base.
        progress: called with bytes written and bytes in all.

    Raises:
        BadOption: ``ranks`` is not above 0.
        CheckpointError: key groups or ``PerRank`` values can't be dealt to another number of ranks.
    """
    if ranks is not None and ranks < 1:
        raise BadOption(f"ranks is {ranks}; it must be 1 or more")
    checkpoint = open_checkpoint(source)
    jobs = list(
        _as_it_was(checkpoint, hashes) if ranks is None else _resharded(checkpoint, ranks, hashes)
    )
    generation = f"gen-{uuid.uuid4().hex}"
    total = sum(job.files.plan.size_bytes for job in jobs)
    told = meter_of(progress, f"rewrite {target}")
    handle = SaveHandle(str(target), time.monotonic(), total, told)  # it only counts bytes
    previous = commit.committed(target)
    try:
        with DataFiles(checkpoint) as data, leftovers.alive(target / generation):
            reports = {
                job.files.rank: write_rank(
                    target / generation, job.files, _Feed(job, data, handle), handle
                )
                for job in jobs
            }
        commit.commit(target, generation, reports, commit.seen(target))
    except BaseException:
        if commit.committed(target) != generation:
            commit.discard(target, generation)
        raise
    commit.remove_old(target, previous, stale_s=QUIET_S)


@dataclass(frozen=True, slots=True)
class _Job:
    """One rank's files to write, and how its parts are read."""

    files: RankFiles
    read: Read


class _Feed:
    """Reads each part, writes it, and forgets it."""

    def __init__(self, job: _Job, data: DataFiles, handle: SaveHandle) -> None:
        self._job, self._data, self._handle = job, data, handle

    def fill(self) -> None:
        """Nothing to copy."""

    def drain(self) -> None:
        """Nothing is held."""

    def into(self, path: Where, known: Known | None) -> tuple[Written, int]:
        """As ``Feed``."""
        assert isinstance(path, Path)
        plan = self._job.files.plan
        header = plan.header if known is None else b""
        writer = ThreadWriter(path, header, known, self._handle.check)
        try:
            for part in plan.parts:
                buffer = torch.empty(part.size_bytes, dtype=torch.uint8)
                reads = Reads(self._data)
                self._job.read(part.tensor, part.held.box, buffer, reads)
                reads.run()
                view = memory(buffer)
                blocks = [
                    view[at : at + BLOCK_BYTES] for at in range(0, part.size_bytes, BLOCK_BYTES)
                ]
                writer.put(blocks).result()
                self._handle.wrote(part.size_bytes)
            return writer.close()
        finally:
            writer.abort()


def _as_it_was(checkpoint: Checkpoint, hashes: bool) -> Iterator[_Job]:
    """Each rank's chunks, read from its own manifest."""
    holders: set[int] = set()
    for manifest in checkpoint.manifests():
        table = checkpoint.table(manifest.group)
        tensors = (*table.tensors, *manifest.own_tensors)
        keys = (
            *table.keys,
            *(f"own/{at}@{manifest.rank}" for at in range(len(manifest.own_tensors))),
        )
        parts = [(chunk.tensor, Held(chunk.box, chunk.box)) for chunk in manifest.chunks]
        laid = file_plan(keys, tensors, parts)
        first = None if manifest.group in holders else table
        holders.add(manifest.group)
        own = (manifest.own, manifest.own_tensors)
        files = _files(manifest.rank, manifest.group, laid, first, own, hashes)
        yield _Job(files, _SameChunks(manifest, tensors))


class _SameChunks:
    """Reads whole chunks of one manifest."""

    def __init__(self, manifest: Manifest, tensors: Sequence[TensorRecord]) -> None:
        self._manifest, self._tensors = manifest, tensors
        self._chunks = {(chunk.tensor, chunk.box): chunk for chunk in manifest.chunks}

    def __call__(self, tensor: int, box: Box, into: torch.Tensor, reads: Reads) -> None:
        dtype = self._tensors[tensor].dtype
        chunk = self._chunks[tensor, box]
        reads.add(self._manifest, chunk, box, into.view(dtype).view(box.size), dtype)


def _resharded(checkpoint: Checkpoint, ranks: int, hashes: bool) -> Iterator[_Job]:
    """Rows of each tensor dealt to ``ranks``; tensors of fewer rows stay whole."""
    if len(checkpoint.commit.tables) > 1:
        raise CheckpointError(
            f"{checkpoint.path}: it has {len(checkpoint.commit.tables)} key groups, whose ranks "
            "hold other keys; load it in a job of the new size and save it there"
        )
    if any(manifest.own for manifest in checkpoint.manifests()):
        raise CheckpointError(
            f"{checkpoint.path}: it holds PerRank values, and nobody can know whose they are among "
            f"{ranks} ranks; load it in a job of the new size and save it there"
        )
    old = checkpoint.table(0)
    mesh = Mesh((ranks,), tuple(range(ranks)))
    rows, whole = Layout(mesh, (Split(0),)), Layout(mesh, (None,))
    layouts = tuple(
        rows if record.shape and record.shape[0] >= ranks and old.keys[at] else whole
        for at, record in enumerate(old.tensors)
    )
    table = Table(old.tree, old.keys, old.tensors, layouts, old.aliases, old.views)
    finder = Finder(checkpoint, 0, 0)

    def read(tensor: int, box: Box, into: torch.Tensor, reads: Reads) -> None:
        dtype = old.tensors[tensor].dtype
        shaped = into.view(dtype).view(box.size)
        if old.keys[tensor]:
            plan_box(old, finder, old.keys[tensor], box, shaped, reads)
            return
        for found in finder.find(tensor, box):
            reads.add(
                found.manifest, found.chunk, found.part, shaped[found.part.inside(box)], dtype
            )

    for rank in range(ranks):
        laid = file_plan(table.keys, table.tensors, plan(table.items, rank))
        yield _Job(_files(rank, 0, laid, None if rank else table, ((), ()), hashes), read)


def _files(
    rank: int,
    group: int,
    laid: FilePlan,
    table: Table | None,
    own: tuple[tuple[Own, ...], Sequence[TensorRecord]],
    hashes: bool,
) -> RankFiles:
    shapes = tuple(torch.empty(r.shape, dtype=r.dtype, device="meta") for r in own[1])
    base = Base(known={}) if hashes else Base()
    return RankFiles(rank, group, laid, table, own[0], shapes, base)
