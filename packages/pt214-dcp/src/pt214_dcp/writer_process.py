"""The process that writes: it maps the arena, checks, writes and fsyncs, and knows no torch.

Started once and kept. Python's lock of the training process is never held by a save, and a
training process that dies takes this one along: its end of the socket closes. This one commits
nothing, so a save whose trainer is gone leaves only a generation that nobody names.

A message is two lengths, a JSON head and raw bytes, on a local socket that only the parent has::

    -> open   {job, path} header       -> write {job, segment, at, known} sizes    -> close {job}
    <- opened                          <- written  columns                         <- closed
    <- error  {errno, text}            to any of them; the job is then over
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
from array import array
from dataclasses import dataclass, field
from typing import Any

_LENGTHS = struct.Struct("<II")
_NICE = 5  # training comes first where both want the same core


def send(sock: socket.socket, head: dict[str, Any], *payload: bytes, fd: int | None = None) -> None:
    """Send one message, with a file descriptor if there is one."""
    text = json.dumps(head).encode()
    lengths = _LENGTHS.pack(len(text), sum(map(len, payload)))
    if fd is not None:
        socket.send_fds(sock, [lengths], [fd])
    else:
        sock.sendall(lengths)
    sock.sendall(b"".join((text, *payload)))


def receive(sock: socket.socket) -> tuple[dict[str, Any], bytes, int | None]:
    """Receive one message.

    Raises:
        EOFError: the other side is gone.
    """
    lengths, fds, _, _ = socket.recv_fds(sock, _LENGTHS.size, 1)
    if not lengths:
        raise EOFError
    lengths += _exactly(sock, _LENGTHS.size - len(lengths))
    head, payload = _LENGTHS.unpack(lengths)
    text = _exactly(sock, head)
    return json.loads(text), _exactly(sock, payload), fds[0] if fds else None


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


@dataclass(slots=True)
class _Job:
    fd: int
    at: int
    known: dict[bytes, tuple[int, int]] | None
    failed: bool = field(default=False)


class Server:
    """Answers one message after the other."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._segments: dict[int, memoryview] = {}
        self._jobs: dict[str, _Job] = {}

    def serve(self) -> None:
        """Until the other side is gone."""
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                head, payload, fd = receive(self._sock)
                try:
                    answer = getattr(self, f"_{head['op']}")(head, payload, fd)
                except OSError as error:
                    self._drop(head.get("job", ""))
                    answer = (
                        {"op": "error", "errno": error.errno, "text": error.strerror or str(error)},
                    )
                if answer is not None:
                    send(self._sock, *answer)

    def _segment(self, head: dict[str, Any], _: bytes, fd: int | None) -> None:
        assert fd is not None
        # Page tables are filled now, not while the first save is copied on the other side.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._segments[head["segment"]] = memoryview(mmap.mmap(fd, head["size"], flags))
        os.close(fd)

    def _ready(self, _: dict[str, Any], __: bytes, ___: int | None) -> tuple[Any, ...]:
        """An answer that comes once all that was told before is done."""
        return ({"op": "ready"},)

    def _forget(self, head: dict[str, Any], _: bytes, __: int | None) -> None:
        self._segments.pop(head["segment"], None)

    def _open(self, head: dict[str, Any], header: bytes, _: int | None) -> tuple[Any, ...]:
        fd = os.open(head["path"], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._jobs[head["job"]] = _Job(fd, 0, None)
        at = _blocks().write_all(fd, [memoryview(header)], 0, lambda: None)
        self._jobs[head["job"]].at = at
        return ({"op": "opened"},)

    def _know(self, head: dict[str, Any], payload: bytes, _: int | None) -> None:
        count = head["count"]
        files = array("H", payload[16 * count : 18 * count])
        offsets = array("q", payload[18 * count :])
        names = (payload[at : at + 16] for at in range(0, 16 * count, 16))
        self._jobs[head["job"]].known = dict(
            zip(names, zip(files, offsets, strict=True), strict=True)
        )

    def _write(self, head: dict[str, Any], payload: bytes, _: int | None) -> tuple[Any, ...]:
        job, memory = self._jobs[head["job"]], self._segments[head["segment"]]
        at, blocks = head["at"], []
        for size in array("I", payload):
            blocks.append(memory[at : at + size])
            at += size
        written, job.at = _blocks().write_blocks(job.fd, blocks, job.at, job.known, lambda: None)
        columns = (written.checksums, written.files, written.offsets)
        data = [column.tobytes() for column in columns]
        lengths = [len(part) for part in data]
        return {"op": "written", "lengths": lengths}, *data, bytes(written.hashes)

    def _close(self, head: dict[str, Any], _: bytes, __: int | None) -> tuple[Any, ...]:
        job = self._jobs[head["job"]]
        os.fsync(job.fd)
        self._drop(head["job"])
        return ({"op": "closed", "size": job.at},)

    def _abort(self, head: dict[str, Any], _: bytes, __: int | None) -> None:
        self._drop(head["job"])

    def _drop(self, name: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            os.close(job.fd)


def _blocks() -> Any:
    """``blocks.py`` beside this file, found without the package around both, which needs torch."""
    return importlib.import_module("blocks")


if __name__ == "__main__":  # writer_process.py FD PATHS...
    sys.path[1:1] = sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, who may finish a save
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    Server(socket.socket(fileno=int(sys.argv[1]))).serve()
