"""Freeing a thread that is blocked in a gloo collective: shut the epoch's own sockets.

Gloo's ``abort`` does nothing (torch 2.14), and its timeout is 30 minutes. But a collective whose
socket is shut down raises within milliseconds, in whichever thread it blocks.

    watch() -> form the group -> its sockets are those that were not there before -> cut(epoch)

Descriptors belong to gloo: they are shut, never closed. A number may have been reused since, by
the next epoch's group even; so identity (inode and both addresses) is checked on a duplicate
before each shutdown, and a cut names its epoch: a late one for an old epoch does nothing.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

Identity = tuple[int, object, object]


class Sockets:
    """The sockets of one process's current group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epoch = 0
        self._mine: dict[int, Identity] = {}
        self._before: dict[int, Identity] | None = None

    @contextmanager
    def forming(self, epoch: int) -> Iterator[None]:
        """Sockets that appear inside belong to ``epoch``; those of the last one are forgotten."""
        with self._lock:
            self._epoch, self._mine = epoch, {}
            self._before = connected()
        try:
            yield
        finally:
            with self._lock:
                self._mine = self._fresh()
                self._before = None

    def cut(self, epoch: int) -> int:
        """Shut the sockets of ``epoch``; how many. Nothing if another epoch has begun."""
        with self._lock:
            if epoch != self._epoch:
                return 0
            targets = self._mine if self._before is None else self._fresh()
            return sum(_shut(fd, identity) for fd, identity in targets.items())

    def _fresh(self) -> dict[int, Identity]:
        before = self._before or {}
        return {fd: who for fd, who in connected().items() if before.get(fd) != who}


def connected() -> dict[int, Identity]:
    """Connected TCP sockets of this process, by descriptor."""
    found = {}
    for name in os.listdir("/dev/fd"):
        if name.isdigit() and (sock := _open(int(name))) is not None:
            with sock:
                if (who := _identity(sock)) is not None:
                    found[int(name)] = who
    return found


def _shut(fd: int, identity: Identity) -> bool:
    sock = _open(fd)
    if sock is None:
        return False
    with sock:  # a duplicate: what it names can't change under us
        if _identity(sock) != identity:
            return False
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # the peer was faster
        return True


def _open(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _identity(sock: socket.socket) -> Identity | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    try:
        return os.fstat(sock.fileno()).st_ino, sock.getsockname(), sock.getpeername()
    except OSError:
        return None  # listening, or not connected any more
