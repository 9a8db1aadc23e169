"""The coordinator on real sockets: strangers are dropped and counted, the store is a store."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from pt214_elastic import membership, wire
from pt214_elastic.client import Client
from pt214_elastic.coordinator import Coordinator
from pt214_elastic.errors import WireError
from pt214_elastic.options import Place

KEY = bytes(range(32))


class Host:
    """A coordinator driven by a thread, as the launcher would."""

    def __init__(self) -> None:
        state = membership.State(target=2)
        self.coordinator = Coordinator(KEY, state, lambda *_, **__: None)
        self.stop = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()
        self.clients: list[Client] = []

    def run(self) -> None:
        while not self.stop:
            self.coordinator.poll(0.01)

    def client(self, member: int, key: bytes = KEY) -> Client:
        host, port = self.coordinator.address
        client = Client(Place(host, port, key, member), on_fault=lambda epoch: None)
        self.clients.append(client)
        return client

    def connect(self) -> socket.socket:
        return socket.create_connection(self.coordinator.address, timeout=5)


def until(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    for client in host.clients:
        client.close()
    host.stop = True
    host.thread.join()
    host.coordinator.close()


def test_garbage_is_dropped_and_counted(host: Host) -> None:
    with host.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: host.coordinator.rejected["not authentic"] == 1)


def test_a_wrong_key_is_dropped_and_counted(host: Host) -> None:
    with pytest.raises(WireError, match="refused"):
        host.client(0, key=bytes(32))
    assert host.coordinator.rejected["not authentic"] == 1
    assert not host.coordinator.known


def test_a_recorded_conversation_cannot_be_replayed(host: Host) -> None:
    with host.connect() as sock:
        theirs = sock.recv(wire.GREETING_BYTES)
        mine = wire.greeting()
        channel = wire.Channel(KEY, theirs, mine, is_coordinator=False)
        recorded = mine + channel.seal({"op": "hello", "member": 5, "pid": 1})
        sock.sendall(recorded)
        until(lambda: 5 in host.coordinator.known)
    until(lambda: 5 not in host.coordinator.known)
    with host.connect() as sock:
        sock.sendall(recorded)
        until(lambda: host.coordinator.rejected["not authentic"] == 1)
    assert 5 not in host.coordinator.known


def test_a_member_id_in_use_is_refused(host: Host) -> None:
    host.client(0)
    with pytest.raises(WireError, match="refused"):
        host.client(0)


def test_a_malformed_message_of_a_member_drops_it(host: Host) -> None:
    with host.connect() as sock:
        mine = wire.greeting()
        channel = wire.Channel(KEY, sock.recv(wire.GREETING_BYTES), mine, is_coordinator=False)
        sock.sendall(mine + channel.seal({"op": "hello", "member": 1, "pid": 1}))
        until(lambda: 1 in host.coordinator.known)
        sock.sendall(channel.seal({"op": "report", "epoch": "x"}))
        until(lambda: host.coordinator.rejected["malformed"] == 1)


def test_strangers_beyond_the_limit_are_refused(host: Host) -> None:
    sockets = [host.connect() for _ in range(70)]
    until(lambda: host.coordinator.rejected["flood"] > 0)
    for sock in sockets:
        sock.close()
