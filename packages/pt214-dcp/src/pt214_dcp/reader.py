"""Read the byte ranges a state dict needs straight into its tensors, each block checked.

A part that is whole rows on both sides goes from the file into the tensor's own memory; any other
one goes through a buffer of the blocks that hold it. Nothing outside the generation's folder is
opened, and nothing is allocated by what a record claims before it is checked against the file.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import crc32c
import torch

from pt214_dcp import files, state
from pt214_dcp.compat import layout_of
from pt214_dcp.errors import ChunkCorrupt, NotACheckpoint, StateMismatch
from pt214_dcp.layout import Box, Held, local_boxes
from pt214_dcp.manifest import (
    BLOCK_BYTES,
    Chunk,
    Commit,
    Manifest,
    TensorRecord,
    data_name,
    read_commit,
    read_manifest,
)
from pt214_dcp.staging import bits, memory, part_of
from pt214_dcp.state import Leaf

ROOT_READS = 10  # a saver may replace the checkpoint while its manifests are read


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Records of one generation, read and checked."""

    path: Path
    commit: Commit
    manifests: tuple[Manifest, ...]

    @property
    def folder(self) -> Path:
        """Where the generation lies."""
        return self.path / self.commit.generation

    @property
    def tree(self) -> state.Json:
        """Nesting and scalars."""
        return self.manifests[0].tree

    @property
    def tensors(self) -> dict[str, TensorRecord]:
        """Each key's dtype and global shape."""
        return dict(zip(self.manifests[0].keys, self.manifests[0].tensors, strict=True))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the root record and all manifests; again, if a saver replaced them meanwhile.

    Raises:
        NotACheckpoint: nothing is committed at ``path``.
        ChunkCorrupt: a record is damaged or files are missing.
    """
    seen: Commit | None = None
    for _ in range(ROOT_READS):
        commit = read_commit(path)
        try:
            ranks = enumerate(commit.ranks)
            folder = path / commit.generation
            manifests = tuple(read_manifest(folder, rank, record) for rank, record in ranks)
        except FileNotFoundError as error:
            if commit == seen:
                raise ChunkCorrupt(f"{error.filename}: named by {path}, but missing") from error
            seen = commit
            continue
        if not manifests or manifests[0].tree is None:
            raise ChunkCorrupt(f"{path}: rank 0's manifest holds no tree of the state")
        return Checkpoint(path, commit, manifests)
    raise NotACheckpoint(f"{path}: replaced {ROOT_READS} times while it was read; stop the saver")


def read_tensor(checkpoint: Checkpoint, key: str, box: Box | None = None) -> torch.Tensor:
    """The tensor ``key``, or the part ``box`` of it, on the CPU; every block is checked.

    Raises:
        KeyError: the checkpoint has no such tensor.
        ChunkCorrupt: stored bytes are wrong, or do not cover the part.
    """
    record = checkpoint.tensors[key]
    whole = box or Box((0,) * len(record.shape), record.shape)
    tensor = torch.empty(whole.size, dtype=record.dtype)
    if 0 in whole.size:
        return tensor
    chunks = [c for manifest in checkpoint.manifests for c in manifest.chunks if c.key == key]
    origin = Box((0,) * len(whole.size), whole.size)
    with DataFiles(checkpoint) as data:
        _fill_box(data, Leaf(key, tensor), Held(whole, origin), chunks)
    return tensor


class DataFiles:
    """Open data files of one generation; each was checked to be as long as the commit says."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._fds: dict[int, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def path(self, rank: int) -> Path:
        """Data file of ``rank``."""
        return self._checkpoint.folder / data_name(rank)

    def read(self, chunk: Chunk, first_block: int, into: memoryview) -> None:
        """Fill ``into`` with whole blocks of ``chunk`` and check them.

        Raises:
            ChunkCorrupt: bytes differ from what was written, or are missing.
        """
        fd, start = self._open(chunk.rank), chunk.offset + first_block * BLOCK_BYTES
        at = 0
        while at < len(into):
            count = os.preadv(fd, [into[at:]], start + at)
            if count == 0:
                raise ChunkCorrupt(f"{self.path(chunk.rank)}: ends at {start + at}, in {chunk.key}")
            at += count
        for low in range(0, len(into), BLOCK_BYTES):
            found = crc32c.crc32c(into[low : low + BLOCK_BYTES])
            wanted = chunk.crcs[first_block + low // BLOCK_BYTES]
            if found != wanted:
                raise ChunkCorrupt(
                    f"{self.path(chunk.rank)}: {chunk.key} at offset {start + low}: expected "
                    f"crc32c {wanted:08x}, found {found:08x}"
                )

    def check_size(self, rank: int) -> None:
        """Raise ChunkCorrupt unless the file of ``rank`` is as long as the commit says."""
        self._open(rank)

    def _open(self, rank: int) -> int:
        if rank not in self._fds:
            try:
                fd = files.open_to_read(self.path(rank))
            except FileNotFoundError as error:
                raise ChunkCorrupt(f"{self.path(rank)}: missing; read the path again") from error
            self._stack.callback(os.close, fd)
            found = os.fstat(fd).st_size
            wanted = self._checkpoint.commit.ranks[rank].data_bytes
            if found != wanted:
                raise ChunkCorrupt(f"{self.path(rank)}: expected {wanted} bytes, found {found}")
            self._fds[rank] = fd
        return self._fds[rank]


def check_fit(checkpoint: Checkpoint, tree: state.Json, leaves: Sequence[Leaf]) -> None:
    """Compare the state dict with the checkpoint before anything is written.

    Raises:
        StateMismatch: with everything that differs.
    """
    ours, theirs = state.kinds(tree), state.kinds(checkpoint.tree)
    missing = [key for key in ours if key not in theirs]
    unexpected = [key for key in theirs if key not in ours]
    different = [
        f"{key}: checkpoint has a {theirs[key]}, state dict has a {kind}"
        for key, kind in ours.items()
        if theirs.get(key, kind) != kind
    ]
    tensors = checkpoint.tensors
    for leaf in leaves:
        found, tensor = tensors.get(leaf.key), leaf.tensor
        if found is not None:
            here, there = (tuple(tensor.shape), tensor.dtype), (found.shape, found.dtype)
            for name, a, b in zip(("shape", "dtype"), here, there, strict=True):
                if a != b:
                    different.append(f"{leaf.key}: checkpoint has {name} {b}, state dict has {a}")
    if missing or unexpected or different:
        raise StateMismatch(str(checkpoint.path), missing, unexpected, different)


def fill(
    checkpoint: Checkpoint, leaves: Sequence[Leaf], rank: int, global_ranks: Sequence[int]
) -> None:
    """Read each tensor's part that this rank holds.

    Raises:
        ChunkCorrupt: stored bytes are wrong, or do not cover a tensor.
    """
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for manifest in checkpoint.manifests:
        for chunk in manifest.chunks:
            chunks[chunk.key].append(chunk)
    with DataFiles(checkpoint) as data, torch.no_grad():
        for leaf in leaves:
            layout = layout_of(leaf.key, leaf.tensor, global_ranks)
            for held in local_boxes(tuple(leaf.tensor.shape), layout, rank):
                _fill_box(data, leaf, held, chunks[leaf.key])


def _fill_box(data: DataFiles, leaf: Leaf, held: Held, chunks: Sequence[Chunk]) -> None:
    into, filled = bits(part_of(leaf.tensor, held)), 0
    for chunk in chunks:
        overlap = held.box.overlap(chunk.box)
        if overlap is not None:
            _read_overlap(data, chunk, overlap, into[overlap.inside(held.box)])
            filled += overlap.numel
    if filled != held.box.numel:
        raise ChunkCorrupt(
            f"{leaf.key}: chunks hold {filled} of the {held.box.numel} elements of {held.box}"
        )


def _read_overlap(data: DataFiles, chunk: Chunk, overlap: Box, into: torch.Tensor) -> None:
    width = into.itemsize
    first, last = _flat_range(chunk.box, overlap)
    low, high = first * width, last * width
    direct = into.device.type == "cpu" and into.is_contiguous() and last - first == overlap.numel
    if direct and low % BLOCK_BYTES == 0 and (high % BLOCK_BYTES == 0 or high == chunk.size_bytes):
        data.read(chunk, low // BLOCK_BYTES, memory(into))
        return
    first_block, last_block = low // BLOCK_BYTES, -(-high // BLOCK_BYTES)
    begin = first_block * BLOCK_BYTES
    stop = min(last_block * BLOCK_BYTES, chunk.size_bytes)
    buffer = torch.empty(stop - begin, dtype=torch.uint8)
    data.read(chunk, first_block, memory(buffer))
    part = buffer[low - begin : high - begin].view(into.dtype)
    into.copy_(part.as_strided(into.shape, _strides(chunk.box.size)))


def _flat_range(box: Box, part: Box) -> tuple[int, int]:
    """First element of ``part`` in the row-major order of ``box``, and one past its last."""
    strides = _strides(box.size)
    starts = [a - b for a, b in zip(part.start, box.start, strict=True)]
    first = sum(at * stride for at, stride in zip(starts, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(part.size, strides, strict=True))
    return first, last + 1


def _strides(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]
