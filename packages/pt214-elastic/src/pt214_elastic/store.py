"""``torch.distributed.Store`` over the coordinator's authenticated channel.

No rank hosts it, so no rank's death ends it; it can be called from any thread. A blocked ``wait``
ends with its timeout, or with ``StoreInterrupted`` when its epoch loses a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from pt214_elastic.client import Client

DEFAULT_TIMEOUT = timedelta(minutes=5)
ANSWER_S = 60.0  # operations that never block: the coordinator only has to be scheduled


class CoordinatorStore(Store):
    """A store of one job; values are bytes, as in TCPStore.

    Through a ``PrefixStore`` all but ``list_keys`` and the queues work: for those torch's C++ side
    calls no Python store. A ``PrefixStore`` does not keep this object alive: its owner must.

    Raises:
        dist.DistStoreError: a ``wait`` or ``get`` timed out.
        StoreInterrupted: the epoch broke during a ``wait`` or ``get``.
    """

    def __init__(self, client: Client, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__()
        self._client = client
        # Kept by the C++ base: a PrefixStore around this one sets and reads it there.
        self.set_timeout(timeout)

    def _call(
        self, verb: str, keys: Sequence[str], blob: bytes = b"", number: int = 0
    ) -> tuple[int, bytes]:
        return self._client.call_store(verb, keys, ANSWER_S, blob, number)

    def set(self, key: str, value: Any) -> None:
        """Write ``value`` under ``key``."""
        self._call("set", [key], _bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for ``key`` and return its value."""
        self.wait([key])
        return self._call("get", [key])[1]

    def add(self, key: str, value: int) -> int:
        """Add to the number under ``key`` (0 if it is not there) and return the sum."""
        return self._call("add", [key], number=value)[0]

    def check(self, keys: list[str]) -> bool:
        """Whether all ``keys`` are there."""
        return bool(self._call("check", keys)[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all ``keys`` are there."""
        if timeout is None:
            timeout = self.timeout  # type: ignore[attr-defined] # torch's stubs lack it
            assert timeout is not None
        try:
            self._client.call_store("wait", keys, timeout.total_seconds())
        except TimeoutError as error:
            raise dist.DistStoreError(str(error)) from None

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> bytes:
        """Write ``desired_value`` if the value is the expected one; return what is there then."""
        expected = _bytes(expected_value)
        blob = expected + _bytes(desired_value)
        return self._call("compare_set", [key], blob, len(expected))[1]

    def delete_key(self, key: str) -> bool:
        """Remove ``key``; whether it was there."""
        return bool(self._call("delete", [key])[0])

    def deleteKey(self, key: str) -> bool:
        """``delete_key`` under the name by which torch's C++ side calls a Python store."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        """``num_keys`` under the name by which torch's C++ side calls a Python store."""
        return self.num_keys()

    def append(self, key: str, value: Any) -> None:
        """Append to the value under ``key``."""
        self._call("append", [key], _bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait for all ``keys`` and return their values."""
        self.wait(keys)
        return [self._call("get", [key])[1] for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Tell torch that append, multi_get and multi_set are here."""
        return True

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._call("num_keys", [])[0]

    def list_keys(self) -> list[str]:
        """All keys."""
        names = self._call("list", [])[1].decode()
        return names.split("\0") if names else []

    def clone(self) -> CoordinatorStore:
        """This store: its channel is shared by all threads anyway."""
        return self


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
