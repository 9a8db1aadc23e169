"""Frames between ranks, each with a code that only who knows the job's secret can make.

    both send 32 random bytes -> session key = HMAC(secret, client's + server's)
    frame: head size | payload size | code | head (JSON) | payload
    code:  keyed blake2b over direction, number of the frame, sizes, head and payload

So nobody else can write to a rank's memory, read from it, or replay what was sent. Until the first
frame of a connection has proven itself it may only be small.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

from pt214_dcp.errors import StoreError

_SIZES = struct.Struct("<IQ")
_NONCE_BYTES = _CODE_BYTES = 32
_MOST_HEAD_BYTES, _FIRST_HEAD_BYTES = 1 << 26, 1 << 12
MOST_PAYLOAD_BYTES = 64 << 20


class Side(enum.Enum):
    """Who sends."""

    CLIENT = b"c"
    SERVER = b"s"


class Channel:
    """One connection, its key agreed.

    Args:
        sock: connected; this object closes it.
        secret: of the job.
        side: which end this is.

    Raises:
        OSError: the other end is gone.
    """

    def __init__(self, sock: socket.socket, secret: bytes, side: Side) -> None:
        self._sock, self._side = sock, side
        mine = os.urandom(_NONCE_BYTES)
        sock.sendall(mine)
        theirs = bytes(self._exactly(_NONCE_BYTES))
        both = mine + theirs if side is Side.CLIENT else theirs + mine
        self._key = hmac.digest(secret, both, "sha256")
        self._sent = self._received = 0

    def send(self, head: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        """Send one frame."""
        text = json.dumps(head).encode()
        code = self._code(self._side, self._sent, text, payload)
        self._sent += 1
        self._sock.sendall(_SIZES.pack(len(text), len(payload)) + code + text)
        if payload:
            self._sock.sendall(payload)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame.

        Raises:
            EOFError: the other end is gone.
            StoreError: a frame that nobody who knows the secret has sent.
        """
        head_bytes, payload_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
        first = not self._received
        most_head = _FIRST_HEAD_BYTES if first else _MOST_HEAD_BYTES
        if head_bytes > most_head or payload_bytes > (0 if first else MOST_PAYLOAD_BYTES):
            raise StoreError(f"a peer's frame claims {head_bytes} and {payload_bytes} bytes")
        code = bytes(self._exactly(_CODE_BYTES))
        text, payload = bytes(self._exactly(head_bytes)), bytes(self._exactly(payload_bytes))
        other = Side.SERVER if self._side is Side.CLIENT else Side.CLIENT
        if not hmac.compare_digest(code, self._code(other, self._received, text, payload)):
            raise StoreError("a peer's frame has a wrong code: it does not know the job's secret")
        self._received += 1
        head: dict[str, Any] = json.loads(text)
        return head, payload

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def _code(self, side: Side, number: int, head: bytes, payload: bytes | memoryview) -> bytes:
        code = hashlib.blake2b(key=self._key, digest_size=_CODE_BYTES)
        code.update(side.value + struct.pack("<QIQ", number, len(head), len(payload)) + head)
        code.update(payload)
        return code.digest()

    def _exactly(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        view, at = memoryview(data), 0
        while at < size_bytes:
            count = self._sock.recv_into(view[at:])
            if count == 0:
                raise EOFError("a peer hung up")
            at += count
        return data
