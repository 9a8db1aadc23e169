"""Copy what this rank writes into one buffer, laid out as its data file will be.

Chunks lie end to end, those of wide elements first: each offset is then a multiple of its element
size with no hole between them, many small tensors become one long write, and each byte of the file
is covered by a checksum. Buffers are kept and used again: the first touch of a page costs ten
times the copy into it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import crc32c
import torch

from pt214_dcp.compat import local_tensor
from pt214_dcp.layout import Held, Item
from pt214_dcp.state import Leaf

# Bits are moved, never values: integers of the same width exist for every dtype and any stride.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Staged:
    """One part of a tensor and where its bytes lie in the buffer."""

    index: int  # of the tensor in the list of leaves
    held: Held
    offset: int
    size_bytes: int


class Arena:
    """Buffers between saves: at most one is kept free, the largest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: torch.Tensor | None = None

    def take(self, size_bytes: int, *, pinned: bool) -> torch.Tensor:
        """A uint8 buffer of at least ``size_bytes``, on the CPU."""
        with self._lock:
            kept, self._free = self._free, None
        if kept is not None and kept.numel() >= size_bytes and (kept.is_pinned() or not pinned):
            return kept
        del kept  # before the new one: two would not fit where one does
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)

    def give(self, buffer: torch.Tensor) -> None:
        """Hand a buffer back."""
        with self._lock:
            if self._free is None or self._free.numel() < buffer.numel():
                self._free = buffer


ARENA = Arena()


def place(items: Sequence[Item], parts: Sequence[tuple[int, Held]]) -> tuple[list[Staged], int]:
    """Give each part its offset; return them in the file's order, and the file's size in bytes."""
    staged, offset = [], 0
    for index, held in sorted(parts, key=lambda part: -items[part[0]].itemsize):
        size_bytes = held.box.numel * items[index].itemsize
        staged.append(Staged(index, held, offset, size_bytes))
        offset += size_bytes
    return staged, offset


def copy(leaves: Sequence[Leaf], staged: Sequence[Staged], buffer: torch.Tensor) -> None:
    """Fill ``buffer``; when this returns, the tensors may change again."""
    devices = set()
    with torch.no_grad():
        for part in staged:
            source = bits(part_of(leaves[part.index].tensor, part.held))
            into = buffer[part.offset : part.offset + part.size_bytes].view(source.dtype)
            into.view(source.shape).copy_(source, non_blocking=True)
            devices.add(source.device)
    for device in devices:
        if device.type != "cpu":  # copies to pinned memory are still under way
            torch.get_device_module(device).synchronize(device)


def part_of(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """The part ``held`` of this rank's local tensor, a view."""
    local = local_tensor(tensor)
    return local[tuple(slice(a, a + n) for a, n in zip(held.local.start, held.local.size))]  # noqa: B905  # lengths agree by construction; this runs once a tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(_BITS[tensor.dtype.itemsize])


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; the caller keeps the tensor alive."""
    size_bytes = tensor.numel() * tensor.itemsize
    if size_bytes == 0:
        return memoryview(bytearray())
    raw = (ctypes.c_ubyte * size_bytes).from_address(tensor.data_ptr())
    return memoryview(raw).cast("B")


def content_hash(tensor: torch.Tensor) -> int:
    """A hash of a local tensor's bits, to tell replicas apart.

    On the CPU a crc32c (order matters); elsewhere torch's own xor on the device, so that nothing
    but eight bytes has to be copied.
    """
    raw = bits(local_tensor(tensor))
    if raw.numel() == 0:
        return 0
    if raw.device.type == "cpu":
        return crc32c.crc32c(memory(raw.contiguous()))
    if raw.dtype == torch.complex128:
        raw = torch.view_as_real(raw).view(torch.int64)
    return int(torch.hash_tensor(raw).item()) & (1 << 64) - 1
