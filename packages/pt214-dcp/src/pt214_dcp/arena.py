"""Memory for copies, shared with the writer process: made once, touched once, used again.

    arena = segments, each one block of shared memory cut in slots of equal size

The first touch of a page costs ten times the copy into it, so slots are kept between saves. All
saves of a process draw from the same slots: together they never hold more than the budget.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)
SLOT_BYTES = 32 << 20  # long enough for full disk speed, short enough to recycle early; not tuned
LEAST_BYTES = 4 << 20  # of a budget
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14 and later


class Segment:
    """One block of shared memory: a file descriptor, a mapping, a tensor over it."""

    def __init__(self, size_bytes: int) -> None:
        self.fd = _shared_file(size_bytes)
        weakref.finalize(self, os.close, self.fd)
        self.size_bytes = size_bytes
        self._map = mmap.mmap(self.fd, size_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.pinned = False

    def touch(self) -> None:
        """Have the pages now, not at the first copy."""
        try:
            self._map.madvise(_POPULATE_WRITE)
        except (OSError, ValueError, AttributeError):
            self.tensor.fill_(0)

    def pin(self) -> None:
        """Lock the pages for copies from a CUDA device; a refusal costs speed only."""
        if self.pinned:
            return
        self.pinned = True
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cudart.cudaHostRegister(self.tensor.data_ptr(), self.size_bytes, 0)
        if int(error) != 0:
            logger.warning("can't pin %d bytes of staging memory: %s", self.size_bytes, error)


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of a segment, taken for one window of a save."""

    segment: Segment
    at: int
    size_bytes: int

    @property
    def tensor(self) -> torch.Tensor:
        """Its bytes as uint8."""
        return self.segment.tensor[self.at : self.at + self.size_bytes]


class Arena:
    """Slots of one size, made when first needed, up to what the callers' budgets allow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._slots = 0
        self._slot_bytes = SLOT_BYTES
        self._pid = os.getpid()

    def reserve(self, windows: int, budget_bytes: int, *, pinned: bool = False) -> int:
        """Make enough slots for ``windows``, or as many as the budget allows; touch them.

        Args:
            windows: of the save to come, each of at most ``slot_bytes(budget_bytes)``.
            budget_bytes: bytes that all slots together may have.
            pinned: for copies from a CUDA device.

        Returns:
            Slots that there are now, in use or free.
        """
        with self._changed:
            self._after_fork()
            size = slot_bytes(budget_bytes)
            if size != self._slot_bytes or self._slots * size > budget_bytes:
                self._start_again(size)  # an earlier save was allowed more
            missing = min(windows, budget_bytes // size) - self._slots
            if missing > 0:
                segment = Segment(missing * size)
                segment.touch()
                self._free += [Slot(segment, at * size, size) for at in range(missing)]
                self._slots += missing
            if pinned:
                for slot in self._free:
                    slot.segment.pin()
            return self._slots

    def segments(self) -> list[Segment]:
        """Those whose slots are free, each once."""
        with self._changed:
            return list({id(slot.segment): slot.segment for slot in self._free}.values())

    def take(self, check: Callable[[], None]) -> Slot:
        """A free slot; waits for one. ``check`` is called while it waits, and may raise."""
        with self._changed:
            while not self._free:
                self._changed.wait(0.1)
                check()
            return self._free.pop()

    def give(self, slot: Slot) -> None:
        """Hand a slot back."""
        with self._changed:
            if slot.size_bytes == self._slot_bytes and self._slots:
                self._free.append(slot)
            self._changed.notify_all()

    def release(self) -> None:
        """Give the memory back to the system; the next save makes it anew."""
        with self._changed:
            self._start_again(self._slot_bytes)

    def _start_again(self, size: int) -> None:
        # Slots still in use keep their segment alive, and are dropped when they are handed back.
        self._free, self._slots, self._slot_bytes = [], 0, size

    def _after_fork(self) -> None:
        """A forked child shares these very pages with its parent: it needs its own."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._start_again(self._slot_bytes)


ARENA = Arena()


def slot_bytes(budget_bytes: int) -> int:
    """Size of a slot: a quarter of a small budget, so that copying and writing overlap."""
    page = mmap.PAGESIZE
    return min(SLOT_BYTES, budget_bytes // 4 // page * page)


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; the caller keeps the tensor alive."""
    size_bytes = tensor.numel() * tensor.itemsize
    if size_bytes == 0:
        return memoryview(bytearray())
    return view_of(tensor.data_ptr(), size_bytes)


def view_of(address: int, size_bytes: int) -> memoryview:
    """Bytes at an address; the caller keeps what lies there alive."""
    return memoryview(_bytes_type(size_bytes).from_address(address)).cast("B")


@functools.lru_cache(1024)
def _bytes_type(size_bytes: int) -> type[ctypes.Array[ctypes.c_ubyte]]:
    """Kept: ctypes would make the type anew for each view, which takes longer than to use it."""
    return ctypes.c_ubyte * size_bytes


def available_bytes() -> int | None:
    """Memory that programs can still have, or None where the system does not say."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _shared_file(size_bytes: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("pt214_dcp staging", os.MFD_CLOEXEC)
    else:  # no name, so nothing is left behind whatever happens
        fd, path = tempfile.mkstemp(prefix="pt214_dcp-")
        os.unlink(path)
    os.ftruncate(fd, size_bytes)
    return fd
