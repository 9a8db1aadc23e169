"""Get the bytes of parts of tensors: where they lie, or copied in the order of the file.

Bits are moved, never values. A part is a rectangle of a tensor of any strides on any device; what
is wanted is a run of its row-major order, as long as a window of the file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from pt214_dcp.arena import memory, view_of
from pt214_dcp.blocks import checksum
from pt214_dcp.compat import local_tensor
from pt214_dcp.file_plan import FilePlan, Part, Window
from pt214_dcp.layout import Held
from pt214_dcp.state import PLAIN

# Integers of the same width exist for every dtype and any stride.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# Below this size a call of torch costs more than the copy. Not tuned.
_SMALL_BYTES = 1 << 16


def part_of(tensor: torch.Tensor, held: Held) -> torch.Tensor:
    """The part ``held`` of this rank's local tensor, a view."""
    local = tensor if type(tensor) in PLAIN else local_tensor(tensor)
    if held.local.size == local.shape:
        return local
    return local[tuple(slice(a, a + n) for a, n in zip(held.local.start, held.local.size))]  # noqa: B905  # lengths agree by construction; this runs once a tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(_BITS[tensor.dtype.itemsize])


class Sources:
    """The parts of a plan as they lie in this process now; they may change from save to save."""

    def __init__(self, plan: FilePlan, tensors: Sequence[torch.Tensor]) -> None:
        self._plan = plan
        self._parts = [part_of(tensors[part.tensor], part.held) for part in plan.parts]
        self._starts = [part.at for part in plan.parts]

    def direct(self) -> bool:
        """Whether every part lies end to end in the CPU's memory, so that it need not be copied."""
        return all(
            part.device.type == "cpu" and part.is_contiguous() and not part.is_conj()
            and not part.is_neg() for part in self._parts
        )  # fmt: skip

    def views(self, window: Window) -> list[memoryview]:
        """The blocks of a window, in the tensors' own memory; only if ``direct``."""
        views = []
        for part, low, high in self._pieces(window):
            source = self._parts[part]
            views.append(view_of(source.data_ptr() + low, high - low))
        return list(_in_blocks(views, self._plan.sizes[window.first : window.last]))

    def copy(
        self,
        window: Window,
        into: torch.Tensor,
        some: frozenset[int] = frozenset(),
        wanted: bool = False,
    ) -> None:
        """Copy a window to the begin of ``into``; copies from a device may lag.

        Args:
            window: which blocks.
            into: uint8 on the CPU.
            some: numbers of parts that are copied only if ``wanted``.
            wanted: whether those parts, and only those, are copied.
        """
        address, at = into.data_ptr(), 0
        with torch.no_grad():
            for number, low, high in self._pieces(window):
                source, size = self._parts[number], high - low
                if (number in some) is not wanted:
                    pass
                elif (
                    size <= _SMALL_BYTES and source.device.type == "cpu" and source.is_contiguous()
                ):
                    raw = bits(source) if source.is_conj() or source.is_neg() else source
                    ctypes.memmove(address + at, raw.data_ptr() + low, size)
                else:
                    raw = bits(source)
                    width = raw.itemsize
                    to = into[at : at + size].view(raw.dtype)
                    copy_run(raw, low // width, high // width, to)
                at += size

    def _pieces(self, window: Window) -> Iterator[tuple[int, int, int]]:
        """``(number of the part, first byte of it, one past its last)`` in a window."""
        end, at = window.at + window.size_bytes, window.at
        number = _part_at(self._plan.parts, at)
        while at < end:
            part = self._plan.parts[number]
            high = min(part.size_bytes, end - part.at)
            if part.size_bytes:
                yield number, at - part.at, high
            at, number = part.at + high, number + 1


def _part_at(parts: Sequence[Part], at: int) -> int:
    """Number of the part that holds byte ``at``."""
    low, high = 0, len(parts)
    while low < high:
        middle = (low + high) // 2
        if parts[middle].at + parts[middle].size_bytes <= at:
            low = middle + 1
        else:
            high = middle
    return low


def _in_blocks(views: Sequence[memoryview], sizes: Sequence[int]) -> Iterator[memoryview]:
    number, at = 0, 0
    for size in sizes:
        yield views[number][at : at + size]
        at += size
        if at == len(views[number]):
            number, at = number + 1, 0


def copy_run(source: torch.Tensor, first: int, last: int, into: torch.Tensor) -> None:
    """Copy elements ``first`` to ``last`` of the row-major order of ``source`` to flat ``into``."""
    if first == 0 and last == source.numel():
        into.view(source.shape).copy_(source, non_blocking=True)
    elif source.is_contiguous():
        into.copy_(source.view(-1)[first:last], non_blocking=True)
    elif source.dim() == 1:
        into.copy_(source[first:last], non_blocking=True)
    else:
        row = source[0].numel()
        head, tail = -(-first // row), last // row
        if head > tail:  # within one row
            copy_run(source[tail], first - tail * row, last - tail * row, into)
            return
        at = head * row - first
        if at:
            copy_run(source[head - 1], row - at, row, into[:at])
        whole = (tail - head) * row
        if whole:
            copy_run(source[head:tail], 0, whole, into[at : at + whole])
        if last > tail * row:
            copy_run(source[tail], 0, last - tail * row, into[at + whole :])


def synchronize(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for copies from devices that may still be under way."""
    for device in {local_tensor(tensor).device for tensor in tensors}:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def content_hash(tensor: torch.Tensor) -> int:
    """A hash of a local tensor's bits, to tell replicas apart.

    On the CPU a checksum (order matters); elsewhere torch's own xor on the device, so that nothing
    but eight bytes has to be copied.
    """
    raw = bits(local_tensor(tensor))
    if raw.numel() == 0:
        return 0
    if raw.device.type == "cpu":
        dense = raw.contiguous()  # named: its memory must outlive the view of it
        return checksum(memory(dense))
    if raw.dtype == torch.complex128:
        raw = torch.view_as_real(raw).view(torch.int64)
    return int(torch.hash_tensor(raw).item()) & (1 << 64) - 1
