"""The store behind ``torch.distributed.Store``, as the coordinator keeps it: keys, and waiters.

Pure: a blocked ``wait`` is an entry here, and each write returns the waiters it has satisfied.
Names and results of the operations are those of torch's TCPStore.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Ticket = tuple[int, int]  # (connection, request)


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to one request."""

    ticket: Ticket
    number: int = 0
    blob: bytes = b""


class KeyValues:
    """Keys with values and the requests that wait for keys to appear."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[Ticket, frozenset[str]] = {}

    def call(
        self, ticket: Ticket, verb: str, keys: Sequence[str], blob: bytes, number: int
    ) -> list[Answer]:
        """Do one operation; return all replies it causes (a waiting one causes none yet).

        Args:
            ticket: names the request in its reply.
            verb: ``set get add check wait cancel delete num_keys compare_set append list``.
            keys: the key or keys; ``compare_set`` takes one.
            blob: the value; for ``compare_set`` the expected value, then the desired one.
            number: what to add, or the length of the expected value.

        Raises:
            ValueError: no such verb, or ``get`` of a key that is not there.
        """
        match verb:
            case "set":
                return [Answer(ticket), *self._write(keys[0], blob)]
            case "append":
                value = self._values.get(keys[0], b"") + blob
                return [Answer(ticket), *self._write(keys[0], value)]
            case "add":
                total = int(self._values.get(keys[0], b"0")) + number
                return [Answer(ticket, total), *self._write(keys[0], str(total).encode())]
            case "compare_set":
                return self._compare_set(ticket, keys[0], blob[:number], blob[number:])
            case "get":
                if keys[0] not in self._values:
                    raise ValueError(f"key {keys[0]!r} is not in the store")
                return [Answer(ticket, blob=self._values[keys[0]])]
            case "wait":
                self._waiting[ticket] = frozenset(keys)
                return self._satisfied()
            case "cancel":
                self._waiting.pop((ticket[0], number), None)
                return [Answer(ticket)]
            case "check":
                return [Answer(ticket, int(all(key in self._values for key in keys)))]
            case "delete":
                return [Answer(ticket, int(self._values.pop(keys[0], None) is not None))]
            case "num_keys":
                return [Answer(ticket, len(self._values))]
            case "list":
                return [Answer(ticket, blob="\0".join(self._values).encode())]
        raise ValueError(f"store operation {verb!r} is unknown")

    def drop(self, connection: int) -> None:
        """Forget what a closed connection waited for."""
        self._waiting = {t: keys for t, keys in self._waiting.items() if t[0] != connection}

    def _write(self, key: str, value: bytes) -> list[Answer]:
        self._values[key] = value
        return self._satisfied()

    def _compare_set(
        self, ticket: Ticket, key: str, expected: bytes, desired: bytes
    ) -> list[Answer]:
        # As TCPStore does: a missing key is set only where nothing was expected.
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            return [Answer(ticket, blob=desired), *self._write(key, desired)]
        return [Answer(ticket, blob=expected if current is None else current)]

    def _satisfied(self) -> list[Answer]:
        here = [t for t, keys in self._waiting.items() if all(k in self._values for k in keys)]
        for ticket in here:
            del self._waiting[ticket]
        return [Answer(ticket) for ticket in here]
