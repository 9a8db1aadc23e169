"""This rank's connections to the others' memories, opened when first needed."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from pt214_dcp.errors import StoreError
from pt214_dcp.peers.server import raise_error
from pt214_dcp.peers.wire import Channel, Side

_LOST_S = 10.0  # a lost peer is not asked again, so that a load waits for its timeout but once


class Peer:
    """The memory of one other rank; requests of several threads take turns.

    Args:
        rank: for messages.
        address: host and port of its server.
        secret: of the job.
        timeout_s: of one request.
    """

    def __init__(
        self, rank: int, address: tuple[str, int], secret: bytes, timeout_s: float
    ) -> None:
        self.rank, self._address = rank, address
        self._secret, self._timeout_s = secret, timeout_s
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._lost_until = 0.0

    def ask(
        self, op: str, payload: bytes | memoryview = b"", **head: Any
    ) -> tuple[dict[str, Any], bytes]:
        """One request and its answer.

        Raises:
            FileNotFoundError: it does not hold the name.
            FileExistsError: it does, and should not.
            CommitConflict: another saver came first.
            StoreError: it is gone, does not answer, or its budget is used up.
        """
        who = f"peer of rank {self.rank} at {self._address[0]}:{self._address[1]}"
        with self._lock:
            if time.monotonic() < self._lost_until:
                raise StoreError(f"{who}: {op} failed: lost a moment ago")
            try:
                if self._channel is None:
                    self._channel = self._connect()
                self._channel.send({"op": op, **head}, payload)
                answer, data = self._channel.receive()
            except (OSError, EOFError) as error:
                self._drop()
                self._lost_until = time.monotonic() + _LOST_S
                raise StoreError(f"{who}: {op} failed: {error or type(error).__name__}") from error
        raise_error(answer, who)
        return answer, data

    def close(self) -> None:
        """Hang up."""
        with self._lock:
            self._drop()

    def _connect(self) -> Channel:
        sock = socket.create_connection(self._address, timeout=self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            channel = Channel(sock, self._secret, Side.CLIENT)
            channel.send({"op": "list", "prefix": "\0"})  # a small first frame proves this side
            channel.receive()
        except BaseException:
            sock.close()
            raise
        return channel

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
