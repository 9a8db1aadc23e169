"""The store against torch's HashStore: called directly, and from torch's C++ side by PrefixStore.

A ``PrefixStore`` calls a Python store through a trampoline that looks methods up by name, some by
the C++ name; a missing one is found only when it is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from pt214_elastic import membership
from pt214_elastic.client import Client
from pt214_elastic.coordinator import Coordinator
from pt214_elastic.errors import StoreInterrupted
from pt214_elastic.options import Place
from pt214_elastic.store import CoordinatorStore
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

KEY = bytes(range(32))
SHORT = timedelta(seconds=0.05)
LONG = timedelta(seconds=30)
CPP_NAMES = ("deleteKey", "getNumKeys")
Make = Callable[[int], Client]

# Each: what to call on a fresh store, in order; the last result is compared.
CALLS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "set and get": [("set", ("a", "1")), ("get", ("a",))],
    "set twice": [("set", ("a", "1")), ("set", ("a", "2")), ("get", ("a",))],
    "bytes that are no text": [("set", ("a", "\x00\xff")), ("get", ("a",))],
    "add": [("add", ("n", 2)), ("add", ("n", 3))],
    "add below zero": [("add", ("n", -2)), ("get", ("n",))],
    "check": [("set", ("a", "1")), ("check", (["a"],))],
    "check of a missing key": [("set", ("a", "1")), ("check", (["a", "b"],))],
    "wait": [("set", ("a", "1")), ("wait", (["a"],))],
    "wait with a limit": [("set", ("a", "1")), ("wait", (["a"], LONG))],
    "compare_set of a new key": [("compare_set", ("c", "", "x"))],
    "compare_set that fits": [("set", ("c", "x")), ("compare_set", ("c", "x", "y"))],
    "compare_set that does not": [("set", ("c", "x")), ("compare_set", ("c", "q", "y"))],
    "compare_set of a missing key": [("compare_set", ("c", "q", "y"))],
    "append": [("set", ("a", "1")), ("append", ("a", "2")), ("get", ("a",))],
    "append to nothing": [("append", ("a", "2")), ("get", ("a",))],
    "multi_set and multi_get": [
        ("multi_set", (["a", "b"], ["1", "2"])),
        ("multi_get", (["b", "a"],)),
    ],
    "has_extended_api": [("has_extended_api", ())],
    "num_keys": [("set", ("a", "1")), ("set", ("b", "1")), ("num_keys", ())],
    "delete_key": [("set", ("a", "1")), ("delete_key", ("a",))],
    "delete_key of a missing key": [("delete_key", ("a",))],
    "a deleted key is gone": [("set", ("a", "1")), ("delete_key", ("a",)), ("check", (["a"],))],
    "barrier of one": [("barrier", ("b", 1, LONG))],
    "timeout": [("set_timeout", (timedelta(seconds=7),))],
}


@pytest.fixture
def client_of() -> Iterator[Make]:
    """Makes clients of a coordinator that a thread drives, as the launcher would."""
    coordinator = Coordinator(KEY, membership.State(target=2), lambda *_, **__: None)
    over = threading.Event()
    clients: list[Client] = []

    def drive() -> None:
        while not over.is_set():
            coordinator.poll(0.01)

    def make(member: int) -> Client:
        host, port = coordinator.address
        clients.append(Client(Place(host, port, KEY, member), on_fault=lambda epoch: None))
        return clients[-1]

    thread = threading.Thread(target=drive)
    thread.start()
    yield make
    for client in clients:
        client.close()
    over.set()
    thread.join()
    coordinator.close()


def results(store: Store, name: str) -> Any:
    return [getattr(store, method)(*args) for method, args in CALLS[name]][-1]


@pytest.mark.parametrize("name", CALLS)
def test_the_store_does_what_torchs_does(client_of: Make, name: str) -> None:
    store = CoordinatorStore(client_of(0))
    assert results(store, name) == results(HashStore(), name)


@pytest.mark.parametrize("name", CALLS)
def test_the_store_does_so_when_called_from_cpp(client_of: Make, name: str) -> None:
    store = CoordinatorStore(client_of(0))  # a name: a PrefixStore does not keep it alive
    ours = PrefixStore("outer", PrefixStore("inner", store))
    theirs = PrefixStore("outer", PrefixStore("inner", HashStore()))
    assert results(ours, name) == results(theirs, name)


@pytest.mark.parametrize(
    ("name", "wanted"), [("delete_key", "deleteKey"), ("num_keys", "getNumKeys")]
)
def test_a_store_without_the_cpp_names_would_be_caught(
    client_of: Make, name: str, wanted: str
) -> None:
    """A saboteur: the same store with torch's Python names alone."""
    kept = {k: v for k, v in vars(CoordinatorStore).items() if k not in CPP_NAMES}
    twin = type("Twin", (Store,), {**kept, "__init__": lambda self: Store.__init__(self)})()
    twin._client = client_of(0)
    with pytest.raises(RuntimeError, match=f"pure virtual.*{wanted}"):
        results(PrefixStore("p", twin), name)


def test_a_prefix_store_keeps_its_keys_apart(client_of: Make) -> None:
    store = CoordinatorStore(client_of(0))
    PrefixStore("p", store).set("k", "v")
    store.set("k", "w")
    assert sorted(store.list_keys()) == ["k", "p/k"]


@pytest.mark.parametrize("prefixed", [False, True])
def test_a_wait_in_vain_ends_with_torchs_error(client_of: Make, prefixed: bool) -> None:
    owned = CoordinatorStore(client_of(0))
    store: Store = PrefixStore("p", owned) if prefixed else owned
    with pytest.raises(dist.DistStoreError, match=r"never.*no answer within 0\.05 s"):
        store.wait(["never"], SHORT)
    with pytest.raises(dist.DistStoreError, match="no answer within 0 s"):
        store.wait(["never"], timedelta(0))
    store.set_timeout(SHORT)
    assert owned.timeout == SHORT  # type: ignore[attr-defined] # not in torch's stubs
    with pytest.raises(dist.DistStoreError, match=r"no answer within 0\.05 s"):
        store.get("never")


def test_what_torch_asks_no_python_store_for_says_so(client_of: Make) -> None:
    store = CoordinatorStore(client_of(0))
    with pytest.raises(NotImplementedError, match="listKeys"):
        PrefixStore("p", store).list_keys()


def test_a_wait_in_a_thread_ends_when_another_member_writes(client_of: Make) -> None:
    one = CoordinatorStore(client_of(0), timedelta(seconds=5))
    two = CoordinatorStore(client_of(1), timedelta(seconds=5))
    got: list[bytes] = []
    prefixed = PrefixStore("p", one)
    thread = threading.Thread(target=lambda: got.append(prefixed.get("k")))
    thread.start()
    PrefixStore("p", two).set("k", "v")
    thread.join(timeout=5)
    assert got == [b"v"]


def test_a_fault_ends_a_blocked_wait(client_of: Make) -> None:
    clients = [client_of(0), client_of(1)]
    for client in clients:
        client.send("join", handle="h", on_fault=None, min_ranks=None)
    for client in clients:
        assert client.wait_record() is not None
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            CoordinatorStore(clients[0], timedelta(seconds=60)).wait(["never"])
        except StoreInterrupted as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    clients[1].send("suspect", epoch=1)
    thread.join(timeout=5)
    assert "lost a rank" in str(errors[0])
