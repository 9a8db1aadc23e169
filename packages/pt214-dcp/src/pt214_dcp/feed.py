"""How a rank's bytes get from its tensors to its data file.

    DirectFeed    tensors' own memory ------------------------> threads that write
    StagedFeed    tensors --copy--> slots of the arena -------> the writer process
                            ^ waits when all slots are in use

``fill`` runs in the caller's thread, ``into`` in the background's. With ``overlap``, what only an
optimizer's step changes is copied by a third thread while forward and backward run, and the step
waits for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Protocol

import torch

from pt214_dcp.arena import ARENA, Slot, memory, slot_bytes
from pt214_dcp.blocks import Known, Written
from pt214_dcp.engine import ProcessWriter, ThreadWriter, writer_process
from pt214_dcp.errors import SaveFailed
from pt214_dcp.file_plan import FilePlan, Window
from pt214_dcp.handle import SaveHandle
from pt214_dcp.options import SaveOptions
from pt214_dcp.overlap import Guard, guard_of
from pt214_dcp.staging import Sources, synchronize
from pt214_dcp.stores.place import Place, Where
from pt214_dcp.stores.transfer import upload

logger = logging.getLogger(__name__)
_DIRECT_BYTES = 16 << 20  # of a window that threads write; not tuned
_IN_FLIGHT = 8  # windows handed to threads and not yet written


class Feed(Protocol):
    """The bytes of one save of one rank."""

    def fill(self) -> None:
        """In the caller's thread: copy what must be copied before the call returns."""

    def into(self, path: Where, known: Known | None) -> tuple[Written, int]:
        """In the background: write all to a new file, durably; its blocks and its size."""

    def drain(self) -> None:
        """In the background: give back what is still held, however it ended."""


def feed_of(
    plan: FilePlan,
    tensors: Sequence[torch.Tensor],
    options: SaveOptions,
    blocking: bool,
    handle: SaveHandle,
) -> Feed:
    """The feed that fits: direct if the caller waits and no byte needs a copy."""
    sources = Sources(plan, tensors)
    if blocking and sources.direct():
        return DirectFeed(plan, sources, options, handle)
    return StagedFeed(plan, sources, tensors, options, handle)


class DirectFeed:
    """Blocks are views of the tensors' own memory."""

    def __init__(
        self, plan: FilePlan, sources: Sources, options: SaveOptions, handle: SaveHandle
    ) -> None:
        self._plan, self._sources, self._handle = plan, sources, handle
        self._incremental = options.base is not None or options.hashes

    def fill(self) -> None:
        """Nothing to copy."""

    def into(self, path: Where, known: Known | None) -> tuple[Written, int]:
        """As ``Feed``."""
        header = b"" if self._incremental else self._plan.header
        if isinstance(path, Place):
            check, size_bytes = self._handle.check, self._plan.size_bytes
            return upload(path, header, known, self._sent(), check, size_bytes)
        writer = ThreadWriter(path, header, known, self._handle.check)
        flying: deque[tuple[Future[Written], int]] = deque()
        try:
            for window in self._plan.windows(_DIRECT_BYTES):
                if len(flying) >= _IN_FLIGHT:
                    self._landed(*flying.popleft())
                flying.append((writer.put(self._sources.views(window)), window.size_bytes))
            while flying:
                self._landed(*flying.popleft())
            return writer.close()
        finally:
            writer.abort()

    def _sent(self) -> Iterator[list[memoryview]]:
        """The blocks of each window, for a store; counted once the next window is asked for."""
        for window in self._plan.windows(_DIRECT_BYTES):
            yield self._sources.views(window)
            self._handle.wrote(window.size_bytes)

    def _landed(self, future: Future[Written], size_bytes: int) -> None:
        future.result()
        self._handle.wrote(size_bytes)

    def drain(self) -> None:
        """Nothing is held."""


class StagedFeed:
    """Windows are copied to slots of the arena, and written from there."""

    def __init__(
        self, plan: FilePlan, sources: Sources, tensors: Sequence[torch.Tensor],
        options: SaveOptions, handle: SaveHandle,
    ) -> None:  # fmt: skip
        self._plan, self._sources, self._handle = plan, sources, handle
        self._tensors = tensors
        self._incremental = options.base is not None or options.hashes
        budget = options.budget_bytes
        self._windows = list(plan.windows(slot_bytes(budget)))
        self._devices = any(tensor.device.type != "cpu" for tensor in tensors)
        pinned = any(tensor.device.type == "cuda" for tensor in tensors)
        held = ARENA.reserve(len(self._windows), budget, pinned=pinned)
        self._guard: Guard | None = None
        if options.overlap and held >= len(self._windows):
            self._guard = guard_of(options.overlap, plan, tensors)
        elif options.overlap:
            logger.info("no overlap: the state is larger than staging_bytes")
        self._queue: queue.SimpleQueue[tuple[Slot, array[int]] | BaseException | None]
        self._queue = queue.SimpleQueue()
        self._dead = threading.Event()  # the background has failed; copy no more
        self._drained = False
        writer_process()  # started here: the background needs it, and a fork in a thread is worse

    def fill(self) -> None:
        """Copy window by window; with a guard, what the optimizers own is copied after return."""
        if self._guard is None:
            self._finish(self._copy_windows)
            return
        slots = [ARENA.take(self._check) for _ in self._windows]
        self._copy_all(slots, guarded=False)
        self._handle.lazy(self._guard.hold(lambda: self._finish(lambda: self._copy_lazily(slots))))

    def _copy_windows(self) -> None:
        for window in self._windows:
            slot = ARENA.take(self._check)
            self._sources.copy(window, slot.tensor)
            if self._devices:
                synchronize(self._tensors)
            self._put(slot, window)

    def _copy_lazily(self, slots: Sequence[Slot]) -> None:
        assert self._guard is not None
        self._copy_all(slots, guarded=True)
        self._guard.check()
        for slot, window in zip(slots, self._windows, strict=True):
            self._put(slot, window)

    def _copy_all(self, slots: Sequence[Slot], *, guarded: bool) -> None:
        assert self._guard is not None
        for slot, window in zip(slots, self._windows, strict=True):
            self._sources.copy(window, slot.tensor, self._guard.parts, guarded)
        if self._devices:
            synchronize(self._tensors)

    def _put(self, slot: Slot, window: Window) -> None:
        self._queue.put((slot, self._plan.sizes[window.first : window.last]))

    def _finish(self, copy: Callable[[], None]) -> None:
        """The background hears of the end, and of an error, whatever happens here."""
        try:
            copy()
        except BaseException as error:
            self._queue.put(error)
            return
        finally:
            self._tensors = ()
        self._queue.put(None)

    def _check(self) -> None:
        if self._dead.is_set():
            raise SaveFailed("the save failed while its tensors were copied")

    def into(self, path: Where, known: Known | None) -> tuple[Written, int]:
        """As ``Feed``."""
        header = b"" if self._incremental else self._plan.header
        if isinstance(path, Place):
            check, size_bytes = self._handle.check, self._plan.size_bytes
            with closing(self._sent()) as sent:  # an error must not keep its slot
                return upload(path, header, known, sent, check, size_bytes)
        writer = ProcessWriter(path, header, known, self._handle.check)
        try:
            with closing(self._staged()) as staged:
                for slot, sizes in staged:
                    writer.put(slot, sizes)
            return writer.close()
        finally:
            writer.abort()

    def _staged(self) -> Generator[tuple[Slot, array[int]], None, None]:
        """Slots as they are filled; each is handed back when the next one is asked for."""
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                self._drained = True
                raise item
            slot, sizes = item
            try:
                yield slot, sizes
            finally:
                ARENA.give(slot)
            self._handle.wrote(sum(sizes))
        self._drained = True

    def _sent(self) -> Generator[list[memoryview], None, None]:
        """The blocks of each slot, for a store."""
        with closing(self._staged()) as staged:
            for slot, sizes in staged:
                data, at, blocks = memory(slot.tensor), 0, []
                for size in sizes:
                    blocks.append(data[at : at + size])
                    at += size
                yield blocks

    def drain(self) -> None:
        """As ``Feed``: the copying side may wait for a slot; it is told, and heard to its end."""
        self._dead.set()
        while not self._drained:
            item = self._queue.get()
            if item is None or isinstance(item, BaseException):
                self._drained = True
            else:
                ARENA.give(item[0])
