"""The coordinator's side of every connection: sockets around the pure machine and the store.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pt214_elastic import membership, records, wire
from pt214_elastic.errors import WireError
from pt214_elastic.events import Kind
from pt214_elastic.keyvalues import Answer, KeyValues

log = logging.getLogger("pt214_elastic.coordinator")

HELLO_WITHIN_S = 10.0  # a peer that has not proven itself by then is dropped
MAX_STRANGERS = 64  # unproven connections kept at once; more are refused
READ_BYTES = 1 << 16
MAX_HELLO_BYTES = 4096
WORKER_KINDS = frozenset({Kind.RELEASED, Kind.REPEAT, Kind.JOIN, Kind.CUSTOM})

Note = Callable[..., None]


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


class Coordinator:
    """Listens, authenticates, feeds the machine and passes on what it says.

    Args:
        key: the job's secret.
        state: the machine's first state.
        note: called for each thing worth an event: ``note(kind, member=, step=, epoch=, **data)``.
        host: address to listen on; loopback unless told otherwise.
    """

    def __init__(
        self, key: bytes, state: membership.State, note: Note, host: str = "127.0.0.1"
    ) -> None:
        self.state = state
        self.rejected: Counter[str] = Counter()
        self.finished = False
        self.end: records.End | None = None
        self.record: records.Record | None = None
        self.on_policy: Callable[[str | None, int | None], None] = lambda policy, ranks: None
        self.last_error = ""  # of a member that left with one
        self.policy: str | None = None  # told to members that come
        self._key = key
        self._note = note
        self._store = KeyValues()
        self._peers: dict[int, Peer] = {}
        self._count = 0
        self._formed: set[int] = set()
        self._committed: dict[int, int] = {}
        self._floor = 0
        self._listener = socket.create_server((host, 0), backlog=128)
        self._listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    @property
    def known(self) -> frozenset[int]:
        """Members that have ever proven themselves and are still connected."""
        return frozenset(p.member for p in self._peers.values() if p.member is not None)

    def poll(self, timeout_s: float) -> None:
        """Handle what is ready, at most ``timeout_s`` seconds from now."""
        for key, mask in self.selector.select(timeout_s):
            key.data(mask)
        now_s = time.monotonic()
        self.tell(records.Tick(now_s))
        for peer in list(self._peers.values()):
            if peer.member is None and now_s - peer.since_s > HELLO_WITHIN_S:
                self._drop(peer, "silent")

    def tell(self, event: records.Event) -> None:
        """Give the machine one event and send what it answers."""
        self.state, messages = membership.step(self.state, event)
        for message in messages:
            self._publish(message)

    def close(self) -> None:
        """Close every socket."""
        for peer in list(self._peers.values()):
            self._drop(peer, None)
        self.selector.unregister(self._listener)
        self._listener.close()

    # -- connections ------------------------------------------------------------------------

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
                self._handle(peer, header, blob)
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
        # No verdict on the member here: its launcher's wait tells, as fast, how it went, and a
        # worker whose channel breaks ends itself.
        self._store.drop(peer.number)

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

    def _send(self, peer: Peer, header: dict[str, Any], blob: bytes = b"") -> None:
        if peer.channel is not None:
            self._write(peer, peer.channel.seal(header, blob))

    # -- messages ---------------------------------------------------------------------------

    def _publish(self, message: records.Message) -> None:
        match message:
            case records.NewEpoch(record):
                self.record, self.finished = record, False
                self._formed = set()
                for member, _ in record.members:
                    self._committed[member] = record.base_step
                self._raise_floor(record.base_step)
                body = {"op": "epoch", **asdict(record), "verdict": record.verdict.value}
                self._send_to([member for member, _ in record.members], body)
            case records.Fault(to, epoch, lost):
                self._note(Kind.FAULT, epoch=epoch, lost=list(lost), survivors=list(to))
                self._send_to(to, {"op": "fault", "epoch": epoch, "lost": list(lost)})
            case records.Regroup(to):
                self._send_to(to, {"op": "regroup"})
            case records.Finished(to, epoch):
                self.finished = True
                self._send_to(to, {"op": "finished", "epoch": epoch})
            case records.End(ok, reason):
                self.end = message
                self._send_to(self.known, {"op": "end", "ok": ok, "reason": reason})

    def _send_to(self, members: Any, header: dict[str, Any]) -> None:
        wanted = frozenset(members)
        for peer in list(self._peers.values()):
            if peer.member in wanted:
                self._send(peer, header)

    def _handle(self, peer: Peer, header: dict[str, Any], blob: bytes) -> None:
        if peer.member is None:
            self._hello(peer, header)
            return
        member, op = peer.member, header["op"]
        match op:
            case "store":
                self._serve(peer, header, blob)
            case "join":
                self.on_policy(header["on_fault"], header["min_ranks"])
                self.tell(records.Joined(member, str(header["handle"])))
            case "report":
                self._report(member, header)
            case "suspect":
                self.tell(records.Suspected(member, int(header["epoch"])))
            case "leave":
                self._note(Kind.CUSTOM, member=member, name="leave", error=header["error"])
                self.last_error = str(header["error"]) or self.last_error
                event = records.Lost(member) if header["error"] else records.Left(member)
                self.tell(event)
            case "committed":
                self._committed[member] = int(header["step"]) + 1
                living = [self._committed[m] for m in self.state.members if m in self._committed]
                self._raise_floor(min(living, default=0))
            case "formed":
                self._form(member, int(header["epoch"]))
            case "policy":
                self.on_policy(header["on_fault"], None)
            case "note":
                kind = Kind(header["kind"])
                if kind not in WORKER_KINDS:
                    raise WireError(f"a worker may not report {kind}")
                data = dict(header["data"])
                self._note(kind, member, header.get("step"), header.get("epoch"), **data)
            case _:
                raise WireError(f"message {op!r} is unknown")

    def _hello(self, peer: Peer, header: dict[str, Any]) -> None:
        member = int(header["member"])
        if header["op"] != "hello" or member in self.known:
            raise WireError(f"first message {header['op']!r} of member {member} is no fresh hello")
        peer.member = member
        assert peer.channel is not None
        peer.channel.max_frame_bytes = wire.MAX_FRAME_BYTES
        ended = self.end is not None or self.finished
        self._send(
            peer,
            {"op": "welcome", "epoch": self.state.epoch, "ended": ended, "policy": self.policy},
        )

    def _report(self, member: int, header: dict[str, Any]) -> None:
        standing = records.Standing(
            handle=str(header["handle"]),
            committed=int(header["committed"]),
            complete=bool(header["complete"]),
            filled=bool(header["filled"]),
            hold_world=int(header["hold_world"]),
            hold_until_s=time.monotonic() + float(header["hold_s"]),
            done=bool(header["done"]),
        )
        self.tell(records.Reported(member, int(header["epoch"]), standing))

    def _serve(self, peer: Peer, header: dict[str, Any], blob: bytes) -> None:
        request = int(header["id"])
        keys = [str(key) for key in header["keys"]]
        try:
            answers = self._store.call(
                (peer.number, request), header["verb"], keys, blob, int(header["number"])
            )
        except ValueError as error:
            self._send(peer, {"op": "reply", "id": request, "number": 0, "error": str(error)})
            return
        for answer in answers:
            self._reply(answer)

    def _reply(self, answer: Answer) -> None:
        connection, request = answer.ticket
        if (peer := self._peers.get(connection)) is not None:
            header = {"op": "reply", "id": request, "number": answer.number}
            self._send(peer, header, answer.blob)

    # -- what events tell -------------------------------------------------------------------

    def _raise_floor(self, floor: int) -> None:
        while self._floor < floor:
            self._note(Kind.COMMIT, step=self._floor, epoch=self.state.epoch)
            self._floor += 1

    def _form(self, member: int, epoch: int) -> None:
        if self.record is None or epoch != self.record.epoch:
            return
        self._formed.add(member)
        ids = [item for item, _ in self.record.members]
        if self._formed == set(ids):
            self._note(Kind.EPOCH, epoch=epoch, members=ids, world_size=len(ids),
                       base_step=self.record.base_step, verdict=self.record.verdict.value,
                       joined=list(self.record.fill))  # fmt: skip

    def set_min_ranks(self, min_ranks: int) -> None:
        """Take the workers' word for how few ranks may train."""
        self.state = replace(self.state, min_ranks=min_ranks)
