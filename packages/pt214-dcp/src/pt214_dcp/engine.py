"""Two ways to get bytes into a rank's data file: this process' threads, or the writer process.

A ``DataWriter`` takes windows (some blocks that follow one another) in the file's order and says
what was written. Threads serve saves that training waits for: they read the tensors' own memory.
The writer process serves those behind training, from the arena, without Python's lock.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import os
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from pt214_dcp import writer_process as protocol
from pt214_dcp.arena import Segment, Slot
from pt214_dcp.blocks import Known, Written, write_all, write_blocks
from pt214_dcp.errors import SaveFailed

THREADS = min(4, os.cpu_count() or 1)


class DataWriter(Protocol):
    """One new data file; windows come in the file's order, and ``close`` makes them durable."""

    def close(self) -> tuple[Written, int]:
        """Wait until the disk has all of it; what is known of the blocks, and the file's size."""

    def abort(self) -> None:
        """Let go of the file, which stays as it is; its folder is removed with all in it."""


class ThreadWriter:
    """Writes from this process' memory, with some threads: checksums and copies overlap.

    Args:
        path: of the file, which must not exist.
        header: its first bytes.
        known: blocks that need not be written; None writes all.
        check: called often; raises to stop.
    """

    def __init__(
        self, path: Path, header: bytes, known: Known | None, check: Callable[[], None]
    ) -> None:
        self._known, self._check = known, check
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._at = write_all(self._fd, [memoryview(header)], 0, check)
        # With known blocks left out, where a window goes depends on the one before it.
        self._pool = ThreadPoolExecutor(1 if known is not None else THREADS, "pt214_dcp write")
        self._written: list[Future[Written]] = []

    def put(self, blocks: Sequence[memoryview]) -> Future[Written]:
        """Write a window of blocks; its memory must last until the answer is there."""
        if self._known is None:
            future = self._pool.submit(self._write, blocks, self._at)
            self._at += sum(map(len, blocks))
        else:
            future = self._pool.submit(self._write_new, blocks)
        self._written.append(future)
        return future

    def close(self) -> tuple[Written, int]:
        """As ``DataWriter``."""
        written = Written()
        for future in self._written:
            written.extend(future.result())
        self._check()
        os.fsync(self._fd)
        self.abort()
        return written, self._at

    def abort(self) -> None:
        """As ``DataWriter``."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, blocks: Sequence[memoryview], at: int) -> Written:
        return write_blocks(self._fd, blocks, at, None, self._check)[0]

    def _write_new(self, blocks: Sequence[memoryview]) -> Written:
        written, self._at = write_blocks(self._fd, blocks, self._at, self._known, self._check)
        return written


class ProcessWriter:
    """Has the writer process write windows that lie in the arena.

    Args: as ``ThreadWriter``.
    """

    _numbers = itertools.count()

    def __init__(
        self, path: Path, header: bytes, known: Known | None, check: Callable[[], None]
    ) -> None:
        self._check = check
        self._process = writer_process()
        self._job = f"{os.getpid()}-{next(self._numbers)}"
        self._incremental = known is not None
        self._written = Written()
        self._open = True
        self._process.ask({"op": "open", "job": self._job, "path": str(path)}, header)
        if known is not None:
            places = list(known.values())
            columns = array("H", [f for f, _ in places]), array("q", [at for _, at in places])
            head = {"op": "know", "job": self._job, "count": len(known)}
            self._process.tell(head, b"".join(known), *[column.tobytes() for column in columns])

    def put(self, slot: Slot, sizes: array[int]) -> None:
        """Write the blocks of ``sizes`` bytes that lie end to end in ``slot``."""
        self._check()
        segment = self._process.segment(slot.segment)
        head = {"op": "write", "job": self._job, "segment": segment, "at": slot.at}
        answer, data = self._process.ask(head, sizes.tobytes())
        checksums, files, offsets = answer["lengths"]
        self._written.checksums.frombytes(data[:checksums])
        self._written.files.frombytes(data[checksums : checksums + files])
        self._written.offsets.frombytes(data[checksums + files : checksums + files + offsets])
        self._written.hashes += data[checksums + files + offsets :]

    def close(self) -> tuple[Written, int]:
        """As ``DataWriter``."""
        self._check()
        answer, _ = self._process.ask({"op": "close", "job": self._job})
        self._open = False
        return self._written, int(answer["size"])

    def abort(self) -> None:
        """As ``DataWriter``."""
        if self._open:
            self._open = False
            self._process.tell({"op": "abort", "job": self._job})


class WriterProcess:
    """This side of the writer process; saves take turns with their messages."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        script = Path(protocol.__file__)
        paths = [str(script.parent), *_folders_of("xxhash")]
        # -S and -E: no site-packages hooks and no PYTHON* variables run code or add memory there.
        command = [sys.executable, "-S", "-E", str(script), str(theirs.fileno()), *paths]
        self._child = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self._sock = ours
        self._segments: dict[int, Segment] = {}

    @property
    def child_pid(self) -> int:
        """Process id of the writer."""
        return self._child.pid

    def alive(self) -> bool:
        """Whether it can still be asked, by this very process."""
        return self.pid == os.getpid() and self._child.poll() is None

    def segment(self, segment: Segment) -> int:
        """Number of a segment that it has mapped, mapping it if it has not."""
        number = segment.fd
        if self._segments.get(number) is not segment:
            with self._lock:
                head = {"op": "segment", "segment": number, "size": segment.size_bytes}
                protocol.send(self._sock, head, fd=segment.fd)
            self._segments[number] = segment
        return number

    def tell(self, head: dict[str, Any], *payload: bytes) -> None:
        """Send a message that has no answer."""
        try:
            with self._lock:
                protocol.send(self._sock, head, *payload)
        except OSError:
            if head["op"] != "abort":
                raise

    def ask(self, head: dict[str, Any], *payload: bytes) -> tuple[dict[str, Any], bytes]:
        """Send a message and wait for its answer.

        Raises:
            OSError: what the disk said there.
            SaveFailed: the process is gone.
        """
        try:
            with self._lock:
                protocol.send(self._sock, head, *payload)
                answer, data, _ = protocol.receive(self._sock)
        except (EOFError, OSError) as error:
            code = self._child.wait()
            raise SaveFailed(f"the process that writes checkpoints ended with {code}") from error
        if answer["op"] == "error":
            raise OSError(answer["errno"], answer["text"])
        return answer, data

    def leave(self) -> None:
        """Close this end of the socket."""
        self._sock.close()

    def stop(self) -> None:
        """End it; it has no work by now."""
        if self.pid == os.getpid():
            self.leave()
            self._child.wait()


_process: WriterProcess | None = None
# Of a parent that forked this process, or ended: kept, since Popen complains where it is forgotten.
_LEFT: list[WriterProcess] = []
_process_lock = threading.Lock()


def writer_process() -> WriterProcess:
    """The writer of this process, started if it does not run."""
    global _process
    with _process_lock:
        if _process is not None and not _process.alive():
            _process.leave()
            _LEFT.append(_process)
            _process = None
        if _process is None:
            _process = WriterProcess()
        return _process


@atexit.register
def _stop() -> None:
    if _process is not None:
        _process.stop()


def _folders_of(*names: str) -> list[str]:
    """Folders that hold these packages, where installed."""
    found = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parent
            found.append(str(folder.parent if spec.submodule_search_locations else folder))
    return list(dict.fromkeys(found))
