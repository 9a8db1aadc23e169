"""From what a rank needs to reads of its files: straight into tensors where the bytes fit.

A block that belongs whole to one run of a tensor on the CPU is read into the tensor's own memory;
runs of such blocks that lie end to end in a file are one read. Where blocks are needed in part, the
tensor is strided, on a device or of another dtype, the blocks are read into a buffer of bounded
size and copied from there. Every block is read once for each box that needs it, and checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from pt214_dcp.arena import memory, view_of
from pt214_dcp.data_files import DataFiles, Run
from pt214_dcp.layout import Box
from pt214_dcp.manifest import BLOCK_BYTES, Chunk, Manifest

THREADS = min(8, os.cpu_count() or 1)
BATCH_BYTES = 8 << 20  # of one job; not tuned
BATCH_BLOCKS = BATCH_BYTES // BLOCK_BYTES
# Of one buffer: its first and last block may be read for its neighbour, too, so 1 in 32 at most.
BUFFER_BYTES = 32 << 20
_MOST_RUNS = 1000  # in one preadv: with the blocks of a long one below 1024, which is IOV_MAX


class Direct(NamedTuple):
    """A run and the address where it goes."""

    run: Run
    address: int


class Copied(NamedTuple):
    """Blocks of a chunk, of which a part goes to ``into``.

    Attributes:
        runs: end to end in the chunk's row-major order.
        chunk: shape of the chunk.
        first: first element of the part, counted from the first block's begin.
        dtype: of the stored bytes.
        into: the tensor to fill, of the part's shape.
    """

    runs: tuple[Run, ...]
    chunk: tuple[int, ...]
    first: int
    dtype: torch.dtype
    into: torch.Tensor


class Reads:
    """Reads planned for one load; ``run`` makes them."""

    def __init__(self, data: DataFiles) -> None:
        self._data = data
        self._direct: list[Direct] = []
        self._copied: list[Copied] = []
        self._after: list[Callable[[], object]] = []
        self.size_bytes = 0

    def after(self, call: Callable[[], object]) -> None:
        """Have ``call`` run once everything is read."""
        self._after.append(call)

    def add(
        self, manifest: Manifest, chunk: Chunk, part: Box, into: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Plan to fill ``into`` with ``part`` of a chunk.

        Args:
            manifest: that holds the chunk.
            chunk: whose box holds ``part``.
            part: box of the global tensor.
            into: tensor of the part's shape; of ``dtype``, unless values are to be cast.
            dtype: of the stored bytes.
        """
        width = dtype.itemsize
        first, last = flat_range(chunk.box, part)
        plain = into.device.type == "cpu" and into.is_contiguous() and into.dtype == dtype
        if plain and last - first == part.numel:
            self._add_run(manifest, chunk, first * width, last * width, into.view(-1))
            return
        for piece in _pieces(chunk.box, part, width):
            self._add_copied(manifest, chunk, piece, into[piece.inside(part)], dtype)

    def _add_run(
        self, manifest: Manifest, chunk: Chunk, low: int, high: int, into: torch.Tensor
    ) -> None:
        """Bytes ``low`` to ``high`` of a chunk: whole blocks directly, those at the ends copied."""
        start = -(-low // BLOCK_BYTES) * BLOCK_BYTES
        stop = high if high == chunk.size_bytes else high // BLOCK_BYTES * BLOCK_BYTES
        if start >= stop:
            edges = [(low, high)]
        else:
            edges = [(low, start), (stop, high)]
            self._add_direct(manifest, chunk, start, stop, into.data_ptr() + start - low)
        width, row = into.itemsize, chunk.size_bytes // into.itemsize
        flat = Chunk(chunk.tensor, Box((0,), (row,)), chunk.size_bytes, chunk.first_block)
        for begin, end in edges:
            if begin < end:
                part = Box((begin // width,), ((end - begin) // width,))
                to = into[(begin - low) // width : (end - low) // width]
                self._add_copied(manifest, flat, part, to, into.dtype)

    def add_whole(self, manifest: Manifest, chunk: Chunk, into: torch.Tensor) -> None:
        """Plan to fill a contiguous CPU tensor of the stored dtype with all of a chunk."""
        if chunk.blocks == 1 and manifest.block_files is None:  # most tensors: no loop for them
            (run,) = self._data.runs(manifest, chunk.first_block, 1, chunk.tensor)
            self.size_bytes += run.size_bytes
            self._direct.append(Direct(run, into.data_ptr()))
            return
        self._add_direct(manifest, chunk, 0, chunk.size_bytes, into.data_ptr())

    def _add_direct(
        self, manifest: Manifest, chunk: Chunk, low: int, high: int, address: int
    ) -> None:
        first, last = low // BLOCK_BYTES, -(-high // BLOCK_BYTES)
        self.size_bytes += high - low
        for begin in range(first, last, BATCH_BLOCKS):
            count = min(BATCH_BLOCKS, last - begin)
            for run in self._data.runs(manifest, chunk.first_block + begin, count, chunk.tensor):
                self._direct.append(Direct(run, address))
                address += run.size_bytes

    def _add_copied(
        self,
        manifest: Manifest,
        chunk: Chunk,
        part: Box,
        into: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        width = dtype.itemsize
        first, last = flat_range(chunk.box, part)
        begin, end = first * width // BLOCK_BYTES, -(-last * width // BLOCK_BYTES)
        runs = self._data.runs(manifest, chunk.first_block + begin, end - begin, chunk.tensor)
        skipped = first - begin * BLOCK_BYTES // width
        item = Copied(tuple(runs), chunk.box.size, skipped, dtype, into)
        self._copied.append(item)
        self.size_bytes += sum(run.size_bytes for run in item.runs)

    def run(self, progress: Callable[[int], None] | None = None) -> None:
        """Make all reads, some threads at a time; the first error ends it.

        Args:
            progress: called with the bytes of each read done, from any thread.

        Raises:
            ChunkCorrupt: stored bytes are wrong.
        """
        batches = [*_batches(self._direct)]

        def direct(batch: list[Direct]) -> None:
            views = [view_of(item.address, item.run.size_bytes) for item in batch]
            self._data.read([item.run for item in batch], views)
            if progress is not None:
                progress(sum(map(len, views)))

        def copied(item: Copied) -> None:
            size = _copy(self._data, item)
            if progress is not None:
                progress(size)

        with ThreadPoolExecutor(THREADS, "pt214_dcp read") as pool:
            jobs = [pool.submit(direct, batch) for batch in batches]
            jobs += [pool.submit(copied, item) for item in self._copied]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        with torch.no_grad():
            for call in self._after:
                call()


def _copy(data: DataFiles, item: Copied) -> int:
    size = sum(run.size_bytes for run in item.runs)
    buffer = torch.empty(size, dtype=torch.uint8)
    at, view = 0, memory(buffer)
    for run in item.runs:
        data.read([run], [view[at : at + run.size_bytes]])
        at += run.size_bytes
    width = item.dtype.itemsize
    stored = buffer[: size // width * width].view(item.dtype)[item.first :]
    with torch.no_grad():
        item.into.copy_(stored.as_strided(item.into.shape, strides_of(item.chunk)))
    return size


def _batches(items: Sequence[Direct]) -> Iterator[list[Direct]]:
    """Runs that lie end to end in a file, in reads of bounded size."""
    batch: list[Direct] = []
    size = end = 0
    for item in sorted(items, key=_place):
        run = item.run
        if batch and (
            (run.fd, run.at) != (batch[0].run.fd, end)
            or size >= BATCH_BYTES
            or len(batch) >= _MOST_RUNS
        ):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += run.size_bytes
        end = run.at + run.size_bytes
    if batch:
        yield batch


def _place(item: Direct) -> tuple[int, int]:
    return item.run.fd, item.run.at


def _pieces(box: Box, part: Box, width: int) -> Iterator[Box]:
    """Cut a part so that the bytes between its first and last element fit a buffer."""
    first, last = flat_range(box, part)
    dim = next((d for d, n in enumerate(part.size) if n > 1), None)
    if (last - first) * width <= BUFFER_BYTES or dim is None:
        yield part
        return
    half = part.size[dim] // 2
    for start, stop in ((0, half), (half, part.size[dim])):
        begin, size = list(part.start), list(part.size)
        begin[dim] += start
        size[dim] = stop - start
        yield from _pieces(box, Box(tuple(begin), tuple(size)), width)


def flat_range(box: Box, part: Box) -> tuple[int, int]:
    """First element of ``part`` in the row-major order of ``box``, and one past its last."""
    strides = strides_of(box.size)
    starts = [a - b for a, b in zip(part.start, box.start, strict=True)]
    first = sum(at * stride for at, stride in zip(starts, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(part.size, strides, strict=True))
    return first, last + 1


def strides_of(size: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for n in reversed(size):
        strides.append(step)
        step *= n
    return strides[::-1]
