"""Each rank answers for its memory: a thread that accepts, and one for each connection."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import Any

from pt214_dcp.errors import CommitConflict, StoreError
from pt214_dcp.peers.memory import PIECE_BYTES, Memory
from pt214_dcp.peers.wire import Channel, Side

logger = logging.getLogger(__name__)
_FIRST_S = 10.0  # that a connection has to prove itself
_ERRORS = {
    "missing": FileNotFoundError,
    "exists": FileExistsError,
    "conflict": CommitConflict,
    "failed": StoreError,
}


class Server:
    """Serves a memory on a port of its own until closed.

    Args:
        memory: whose.
        host: address to listen at.
        secret: that clients must know; may be replaced.
    """

    def __init__(self, memory: Memory, host: str, secret: bytes) -> None:
        self._memory, self.secret = memory, secret
        self._open: set[Channel] = set()
        self._sock = socket.create_server((host, 0), backlog=128)
        self.port = int(self._sock.getsockname()[1])
        threading.Thread(target=self._accept, name="pt214_dcp peers", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for channel in [*self._open]:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(sock,), name="pt214_dcp peer", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        channel: Channel | None = None
        try:
            sock.settimeout(_FIRST_S)
            channel = Channel(sock, self.secret, Side.SERVER)
            self._open.add(channel)
            while True:
                head, payload = channel.receive()
                sock.settimeout(None)
                channel.send(*self._answer(head, payload))
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, StoreError):
                logger.warning("%s; its connection was closed", error)
        finally:
            self._open.discard(channel)
            sock.close()

    def _answer(self, head: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        try:
            return self._do(head, payload)
        except tuple(_ERRORS.values()) as error:
            kind = next(kind for kind, known in _ERRORS.items() if isinstance(error, known))
            return {"error": kind, "text": str(error)}, b""

    def _do(self, head: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        memory, name = self._memory, head.get("name", "")
        match head["op"]:
            case "append":
                memory.append(name, payload, head["at"])
            case "finish":
                memory.finish(name)
            case "drop":
                for each in head["names"]:
                    memory.drop(each)
            case "read":
                return {}, memory.read(name, head["offset"], min(head["size"], PIECE_BYTES))
            case "size":
                return {"size": memory.size(name)}, b""
            case "list":
                return {"entries": [list(entry) for entry in memory.list(head["prefix"])]}, b""
            case "root":
                data, version = memory.root(name)
                return {"version": version}, data
            case "set_root":
                memory.set_root(name, payload, head["version"])
            case _:
                raise StoreError(f"no such request: {head['op']!r}")
        return {}, b""


def raise_error(answer: dict[str, Any], who: str) -> None:
    """Raise what a server has answered, if it is an error."""
    if "error" in answer:
        raise _ERRORS[answer["error"]](f"{who}: {answer['text']}")
