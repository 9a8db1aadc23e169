"""A worker's connection to the coordinator: one socket, one receiving thread.

The thread answers store calls and takes pushes: a fault of the current epoch at once breaks the
epoch's sockets (through ``on_fault``), ends blocked store calls and sets a flag; records are kept
for the main thread. When the coordinator is gone, the launcher is: the process ends itself.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pt214_elastic import wire
from pt214_elastic.errors import JobFailed, JobOver, StoreInterrupted, WireError
from pt214_elastic.options import Place
from pt214_elastic.records import Record, Verdict

log = logging.getLogger("pt214_elastic.client")

CONNECT_S = 10.0
READ_BYTES = 1 << 16
ORPHANED = 75  # exit code of a worker whose launcher is gone: EX_TEMPFAIL of sysexits.h


class Client:
    """Speaks for one member.

    Args:
        place: where the coordinator listens, the key, and the member id.
        on_fault: called in the receiving thread with the broken epoch, before anybody wakes.
        on_broken: called there when the epoch is marked as broken.

    Raises:
        WireError: the coordinator does not prove itself, or cannot be reached.
    """

    def __init__(
        self,
        place: Place,
        on_fault: Callable[[int], object],
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        self.member = place.member
        self.epoch = 0  # of the record last taken by the main thread
        self.regroup_wanted = False  # somebody waits to enter: vote for a regroup
        self.broken_s = 0.0  # when the last fault was heard of
        self.policy: str | None = None  # the launcher's, when this process came
        self.job_epoch = 0  # the coordinator's epoch when this process came
        self._on_fault = on_fault
        self._on_broken = on_broken
        self._faulted = 0  # highest epoch known to be broken
        self._lost: tuple[int, ...] = ()
        self._record: Record | None = None
        self._finished = 0
        self._end: tuple[bool, str] | None = None
        self._replies: dict[int, tuple[int, bytes, str | None]] = {}
        self._pending: dict[int, int] = {}  # request -> epoch it was made in
        self._requests = 0
        self._closing = False
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._sock, self._channel = self._connect(place)
        try:
            self.send("hello", member=place.member, pid=os.getpid())
            self._welcome(self._take_first())
        except WireError:
            self._sock.close()
            raise
        threading.Thread(target=self._receive, name="pt214-elastic", daemon=True).start()

    # -- connection -------------------------------------------------------------------------

    def _connect(self, place: Place) -> tuple[socket.socket, wire.Channel]:
        try:
            sock = socket.create_connection((place.host, place.port), CONNECT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            mine = wire.greeting()
            sock.sendall(mine)
            theirs = b""
            while len(theirs) < wire.GREETING_BYTES:
                part = sock.recv(wire.GREETING_BYTES - len(theirs))
                if not part:
                    raise OSError("connection closed")
                theirs += part
        except OSError as error:
            raise WireError(f"no coordinator at {place.host}:{place.port}: {error}") from None
        return sock, wire.Channel(place.key, theirs, mine, is_coordinator=False)

    def _take_first(self) -> dict[str, Any]:
        messages: list[wire.Message] = []
        while not messages:
            try:
                data = self._sock.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                raise WireError("the coordinator refused this member: wrong key, or it is known")
            messages = self._channel.feed(data)
        self._sock.settimeout(None)
        for header, blob in messages[1:]:
            self._take(header, blob)
        return messages[0][0]

    def _welcome(self, header: dict[str, Any]) -> None:
        self.job_epoch = int(header["epoch"])
        self.policy = header["policy"]
        if header["ended"]:
            self._end = (True, "the job was over before this process came")

    def send(self, op: str, blob: bytes = b"", **fields: Any) -> None:
        """Send one message; silently nothing once the coordinator is gone."""
        with self._send_lock:
            try:
                self._sock.sendall(self._channel.seal({"op": op, **fields}, blob))
            except OSError:
                return  # the receiving thread sees it too and ends the process

    def close(self) -> None:
        """Close the channel; the coordinator's silence no longer ends this process."""
        self._closing = True
        self._sock.close()

    def _receive(self) -> None:
        while True:
            try:
                data = self._sock.recv(READ_BYTES)
                messages = self._channel.feed(data)
            except (OSError, WireError) as error:
                data, messages = b"", []
                log.debug("channel: %s", error)
            for header, blob in messages:
                self._take(header, blob)
            if not data:
                break
        if not self._closing:
            log.error("member %d: the launcher is gone; this process ends", self.member)
            os._exit(ORPHANED)

    def _take(self, header: dict[str, Any], blob: bytes) -> None:
        if header["op"] == "fault" and int(header["epoch"]) > self._faulted:
            self._on_fault(int(header["epoch"]))
        with self._changed:
            match header["op"]:
                case "reply":
                    if self._pending.pop(int(header["id"]), None) is not None:
                        answer = (int(header["number"]), blob, header.get("error"))
                        self._replies[int(header["id"])] = answer
                case "fault":
                    self._faulted = max(self._faulted, int(header["epoch"]))
                    self._lost = tuple(header["lost"])
                    self.broken_s = time.monotonic()
                case "epoch":
                    self._record = parse_record(header)
                    self.regroup_wanted = False  # who waited is in it, or it says ``again``
                case "finished":
                    self._finished = int(header["epoch"])
                case "regroup":
                    self.regroup_wanted = True
                case "end":
                    self._end = (bool(header["ok"]), str(header["reason"]))
            self._changed.notify_all()
        if header["op"] == "fault":
            self._on_broken()

    # -- what the main thread asks ----------------------------------------------------------

    @property
    def lost(self) -> tuple[int, ...]:
        """Members named in the last fault."""
        return self._lost

    def is_broken(self, epoch: int) -> bool:
        """Whether the coordinator has declared ``epoch`` broken."""
        return self._faulted >= epoch > 0

    def wait_broken(self, epoch: int, timeout_s: float) -> bool:
        """Wait for the coordinator's word that ``epoch`` is broken."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.is_broken(epoch) or self._end is not None, timeout_s
            ) and self.is_broken(epoch)

    def wait_record(self) -> Record | None:
        """The next record with this member in it; ``None`` when all are done.

        Raises:
            JobFailed: the job ended for a reason, which the message gives.
            JobOver: the job ended well while this process waited to enter.
        """

        def ready() -> bool:
            newer = self._record is not None and self._record.epoch > self.epoch
            return newer or self._end is not None or self._finished == self.epoch > 0

        with self._changed:
            self._changed.wait_for(ready)
            if self._record is not None and self._record.epoch > self.epoch:
                self.epoch = self._record.epoch
                return self._record
            if self._end is not None:
                if self._end[0]:
                    raise JobOver
                raise JobFailed(self._end[1])
            self._finished = 0
            return None

    def wait_finished(self, timeout_s: float) -> bool:
        """Whether all members were done within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._finished == self.epoch, timeout_s)

    def call_store(
        self,
        verb: str,
        keys: Sequence[str],
        timeout_s: float,
        blob: bytes = b"",
        number: int = 0,
    ) -> tuple[int, bytes]:
        """One store operation; from any thread.

        Raises:
            StoreInterrupted: the epoch broke while ``wait`` was blocked, or is broken already.
            TimeoutError: no answer within ``timeout_s`` seconds.
            KeyError: the key is not there.
        """
        with self._changed:
            self._requests += 1
            request, epoch = self._requests, self.epoch
            self._pending[request] = epoch
        self.send("store", blob, id=request, verb=verb, keys=list(keys), number=number)
        deadline_s = time.monotonic() + timeout_s
        with self._changed:

            def over() -> bool:
                return request in self._replies or (verb == "wait" and self.is_broken(epoch))

            self._changed.wait_for(over, max(0.0, deadline_s - time.monotonic()))
            answer = self._replies.pop(request, None)
            self._pending.pop(request, None)
        if answer is not None:
            if answer[2] is not None:
                raise KeyError(answer[2])
            return answer[0], answer[1]
        if verb == "wait":
            self.send("store", id=0, verb="cancel", keys=[], number=request)
        if verb == "wait" and self.is_broken(epoch):
            raise StoreInterrupted(f"epoch {epoch} lost a rank while waiting for {list(keys)}")
        raise TimeoutError(f"store {verb} {list(keys)}: no answer within {timeout_s:g} s")


def parse_record(header: dict[str, Any]) -> Record:
    """The record that a coordinator's message carries."""
    return Record(
        epoch=int(header["epoch"]),
        members=tuple((int(member), str(handle)) for member, handle in header["members"]),
        base_step=int(header["base_step"]),
        verdict=Verdict(header["verdict"]),
        fill=tuple(int(member) for member in header["fill"]),
        source=None if header["source"] is None else int(header["source"]),
        again=bool(header["again"]),
    )
