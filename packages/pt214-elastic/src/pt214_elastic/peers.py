"""Every connection of a coordinator: accepted, authenticated, framed; the bytes, not their meaning.

    accept -> greeting -> hello (authentic, or dropped and counted) -> messages -> closed

One thread drives it through ``poll``; it blocks nowhere else. It must not import torch: it lives
in the launcher, which starts fast and stays small.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from pt214_elastic import wire
from pt214_elastic.errors import WireError

log = logging.getLogger("pt214_elastic.coordinator")

HELLO_WITHIN_S = 10.0  # a peer that has not proven itself by then is dropped
MAX_STRANGERS = 64  # unproven connections kept at once; more are refused
READ_BYTES = 1 << 16
MAX_HELLO_BYTES = 4096


@dataclass(eq=False)
class Peer:
    """One connection; ``member`` is known once its hello proved authentic."""

    sock: socket.socket
    number: int
    greeting: bytes
    since_s: float
    channel: wire.Channel | None = None
    member: int | None = None
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)


class Peers:
    """Listens, and keeps one authenticated channel a peer.

    Args:
        key: the job's secret.
        host: address to listen on.
        on_message: called with each authentic message: ``on_message(peer, header, blob)``. What it
            raises of ``WireError``, ``ValueError``, ``KeyError`` and ``TypeError`` drops the peer.
        on_gone: called when a connection is closed, by whichever side.
    """

    def __init__(
        self,
        key: bytes,
        host: str,
        on_message: Callable[[Peer, dict[str, Any], bytes], None],
        on_gone: Callable[[Peer], None],
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self._key = key
        self._on_message, self._on_gone = on_message, on_gone
        self._peers: dict[int, Peer] = {}
        self._count = 0
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    @property
    def known(self) -> frozenset[int]:
        """Members that have proven themselves and are still connected."""
        return frozenset(p.member for p in self._peers.values() if p.member is not None)

    def poll(self, timeout_s: float) -> None:
        """Handle what is ready, at most ``timeout_s`` seconds from now; drop silent strangers."""
        for key, mask in self.selector.select(timeout_s):
            key.data(mask)
        now_s = time.monotonic()
        for peer in list(self._peers.values()):
            if peer.member is None and now_s - peer.since_s > HELLO_WITHIN_S:
                self._drop(peer, "silent")

    def admit(self, peer: Peer, member: int) -> None:
        """``peer`` has proven to be ``member``."""
        assert peer.channel is not None
        peer.member = member
        peer.channel.max_frame_bytes = wire.MAX_FRAME_BYTES

    def send(self, peer: Peer, header: dict[str, Any], blob: bytes = b"") -> None:
        """Send one message; what the socket does not take now goes later."""
        if peer.channel is not None:
            self._write(peer, peer.channel.seal(header, blob))

    def send_to(self, members: Collection[int], header: dict[str, Any]) -> None:
        """Send one message to each of ``members`` that is connected."""
        for peer in list(self._peers.values()):
            if peer.member in members:
                self.send(peer, header)

    def get(self, number: int) -> Peer | None:
        """The connection of that number, if it still stands."""
        return self._peers.get(number)

    def close(self) -> None:
        """Close every socket."""
        for peer in list(self._peers.values()):
            self._drop(peer, None)
        self.selector.unregister(self._listener)
        self._listener.close()

    # -- sockets ----------------------------------------------------------------------------

    def _accept(self, _mask: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        strangers = sum(peer.member is None for peer in self._peers.values())
        if strangers >= MAX_STRANGERS:
            self.rejected["flood"] += 1
            sock.close()
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._count += 1
        peer = Peer(sock, self._count, wire.greeting(), time.monotonic())
        self._peers[peer.number] = peer
        self.selector.register(sock, selectors.EVENT_READ, lambda mask: self._ready(peer, mask))
        self._write(peer, peer.greeting)

    def _ready(self, peer: Peer, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._write(peer, b"")
        if not mask & selectors.EVENT_READ or peer.number not in self._peers:
            return
        try:
            data = peer.sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer, None)
            return
        try:
            for header, blob in self._read(peer, data):
                self._on_message(peer, header, blob)
        except (WireError, ValueError, KeyError, TypeError) as error:
            reason = "not authentic" if peer.member is None else "malformed"
            log.warning("connection %d dropped (%s): %s", peer.number, reason, error)
            self._drop(peer, reason)

    def _read(self, peer: Peer, data: bytes) -> list[wire.Message]:
        if peer.channel is not None:
            return peer.channel.feed(data)
        peer.inbox += data
        if len(peer.inbox) < wire.GREETING_BYTES:
            return []
        theirs = bytes(peer.inbox[: wire.GREETING_BYTES])
        peer.channel = wire.Channel(self._key, peer.greeting, theirs, is_coordinator=True)
        peer.channel.max_frame_bytes = MAX_HELLO_BYTES  # until it has proven itself
        return peer.channel.feed(bytes(peer.inbox[wire.GREETING_BYTES :]))

    def _drop(self, peer: Peer, reason: str | None) -> None:
        if self._peers.pop(peer.number, None) is None:
            return
        if reason is not None:
            self.rejected[reason] += 1
        self.selector.unregister(peer.sock)
        peer.sock.close()
        self._on_gone(peer)

    def _write(self, peer: Peer, data: bytes) -> None:
        peer.outbox += data
        try:
            while peer.outbox:
                del peer.outbox[: peer.sock.send(peer.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer, None)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outbox else 0)
        self.selector.modify(peer.sock, wanted, lambda mask: self._ready(peer, mask))
