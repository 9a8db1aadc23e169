"""Authenticated frames between the coordinator and its members.

    coordinator -> member   MAGIC | nonce[16]
    member -> coordinator   MAGIC | nonce[16]
    then, both ways         length u32 | mac[32] | header length u32 | header JSON | blob

    mac = HMAC-SHA256(key of this direction, sequence number u64 | body)
    key of a direction = HMAC-SHA256(job key, direction | both nonces)

The sequence number is counted, not sent: a frame that is replayed, reordered, dropped, taken from
another connection or sent back to its writer fails its check. Nothing received is unpickled.
Source: RFC 2104 (HMAC); the counter is that of TLS records, RFC 8446 section 5.3.
"""

from __future__ import annotations

import hmac
import json
import os
import struct
from collections.abc import Mapping
from typing import Any

from pt214_elastic.errors import WireError

MAGIC = b"PT214EL1"
NONCE_BYTES = 16
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
MAC_BYTES = 32
MAX_FRAME_BYTES = 64 << 20

Message = tuple[dict[str, Any], bytes]


def greeting() -> bytes:
    """What each side sends first: the magic word and a fresh nonce."""
    return MAGIC + os.urandom(NONCE_BYTES)


def _direction_key(job_key: bytes, name: bytes, nonces: bytes) -> bytes:
    return hmac.digest(job_key, name + nonces, "sha256")


class Channel:
    """One end of a connection: turns messages into frames and bytes into messages.

    Args:
        job_key: the secret shared by the launcher and its members, at least 16 bytes.
        coordinator: greeting of the coordinator, whole.
        member: greeting of the member, whole.
        is_coordinator: which of the two this end is.

    Raises:
        WireError: a greeting is not ours, or the key is too short.
    """

    def __init__(
        self, job_key: bytes, coordinator: bytes, member: bytes, *, is_coordinator: bool
    ) -> None:
        if len(job_key) < 16:
            raise WireError(f"job key has {len(job_key)} bytes: at least 16 are needed")
        for words in (coordinator, member):
            if len(words) != GREETING_BYTES or not words.startswith(MAGIC):
                raise WireError(f"greeting {words[:8]!r} does not start with {MAGIC!r}")
        nonces = coordinator + member
        down = _direction_key(job_key, b"coordinator", nonces)
        up = _direction_key(job_key, b"member", nonces)
        self._send_key, self._receive_key = (down, up) if is_coordinator else (up, down)
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.max_frame_bytes = MAX_FRAME_BYTES

    def seal(self, header: Mapping[str, Any], blob: bytes = b"") -> bytes:
        """The frame of one message; frames must be written in the order they were sealed."""
        text = json.dumps(header, separators=(",", ":")).encode()
        body = struct.pack(">I", len(text)) + text + blob
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"message of {len(body)} bytes: at most {MAX_FRAME_BYTES} fit")
        mac = hmac.digest(self._send_key, struct.pack(">Q", self._sent) + body, "sha256")
        self._sent += 1
        return struct.pack(">I", len(body)) + mac + body

    def feed(self, data: bytes) -> list[Message]:
        """Take bytes as they came and return the messages they complete.

        Raises:
            WireError: a frame is too long, not authentic or malformed; drop the connection.
        """
        self._buffer += data
        messages = []
        while (body := self._next_body()) is not None:
            messages.append(_parse(body))
        return messages

    def _next_body(self) -> bytes | None:
        if len(self._buffer) < 4:
            return None
        (size,) = struct.unpack_from(">I", self._buffer)
        if not 4 <= size <= self.max_frame_bytes:
            raise WireError(f"frame of {size} bytes: 4 to {self.max_frame_bytes} are allowed")
        end = 4 + MAC_BYTES + size
        if len(self._buffer) < end:
            return None
        mac, body = bytes(self._buffer[4 : 4 + MAC_BYTES]), bytes(self._buffer[4 + MAC_BYTES : end])
        wanted = hmac.digest(self._receive_key, struct.pack(">Q", self._received) + body, "sha256")
        if not hmac.compare_digest(mac, wanted):
            raise WireError(f"frame {self._received} is not authentic: wrong key, replay or damage")
        del self._buffer[:end]
        self._received += 1
        return body


def _parse(body: bytes) -> Message:
    (size,) = struct.unpack_from(">I", body)
    try:
        header = json.loads(body[4 : 4 + size])
    except ValueError as error:
        raise WireError(f"frame's header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("op"), str):
        raise WireError("frame's header is not an object with an 'op'")
    return header, body[4 + size :]
