"""The coordinator: messages of members to the pure machine and the store, and their answers back.

    hello -> join -> (record: formed, committed, notes, store calls) -> report -> record -> leave

One thread drives it through ``poll``; it blocks nowhere else. It must not import torch: it lives
in the launcher, which starts fast and stays small.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from pt214_elastic import membership, records
from pt214_elastic.errors import WireError
from pt214_elastic.events import Kind
from pt214_elastic.keyvalues import Answer, KeyValues
from pt214_elastic.peers import Peer, Peers

WORKER_KINDS = frozenset({Kind.RELEASED, Kind.REPEAT, Kind.JOIN, Kind.CUSTOM})

Note = Callable[..., None]


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
        self.finished = False
        self.end: records.End | None = None
        self.record: records.Record | None = None
        self.on_policy: Callable[[str | None, int | None], None] = lambda policy, ranks: None
        self.last_error = ""  # of a member that left with one
        self.policy: str | None = None  # told to members that come
        self._note = note
        self._store = KeyValues()
        # No verdict on a member whose connection goes: its launcher's wait tells, as fast, how it
        # went, and a worker whose channel breaks ends itself.
        self._peers = Peers(key, host, self._handle, lambda peer: self._store.drop(peer.number))
        self.rejected = self._peers.rejected
        self.selector = self._peers.selector
        self.address = self._peers.address
        self._formed: set[int] = set()
        self._committed: dict[int, int] = {}
        self._floor = 0

    @property
    def known(self) -> frozenset[int]:
        """Members that have ever proven themselves and are still connected."""
        return self._peers.known

    def poll(self, timeout_s: float) -> None:
        """Handle what is ready, at most ``timeout_s`` seconds from now."""
        self._peers.poll(timeout_s)
        self.tell(records.Tick(time.monotonic()))

    def tell(self, event: records.Event) -> None:
        """Give the machine one event and send what it answers."""
        self.state, messages = membership.step(self.state, event)
        for message in messages:
            self._publish(message)

    def close(self) -> None:
        """Close every socket."""
        self._peers.close()

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
                self._peers.send_to([member for member, _ in record.members], body)
            case records.Fault(to, epoch, lost):
                self._note(Kind.FAULT, epoch=epoch, lost=list(lost), survivors=list(to))
                self._peers.send_to(to, {"op": "fault", "epoch": epoch, "lost": list(lost)})
            case records.Regroup(to):
                self._peers.send_to(to, {"op": "regroup"})
            case records.Finished(to, epoch):
                self.finished = True
                self._peers.send_to(to, {"op": "finished", "epoch": epoch})
            case records.End(ok, reason):
                self.end = message
                self._peers.send_to(self.known, {"op": "end", "ok": ok, "reason": reason})

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
        self._peers.admit(peer, member)
        ended = self.end is not None or self.finished
        self._peers.send(
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
            self._peers.send(peer, {"op": "reply", "id": request, "number": 0, "error": str(error)})
            return
        for answer in answers:
            self._reply(answer)

    def _reply(self, answer: Answer) -> None:
        connection, request = answer.ticket
        if (peer := self._peers.get(connection)) is not None:
            header = {"op": "reply", "id": request, "number": answer.number}
            self._peers.send(peer, header, answer.blob)

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
