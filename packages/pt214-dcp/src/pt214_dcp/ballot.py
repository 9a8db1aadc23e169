"""In the background: who has written, and whether it was committed, told through the store.

    leaves  --done/<rank>-->  inner ranks  --done/<rank>-->  rank 0 commits  --outcome-->  all

Reports go up a tree of 32 children a rank, so that rank 0 asks the store for 32 values, not for as
many as there are ranks. Keys carry the save's uuid, so a save that died leaves nothing that a later
one could take for its own. The store is only polled: a blocking wait would hold a TCPStore client
that training needs.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pt214_dcp.errors import SaveFailed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Between two looks at the store: short first, then rare enough for thousands of ranks. Not tuned.
_POLL_FIRST_S, _POLL_MOST_S = 0.002, 0.25
FAN_IN = 32
# An inner rank gives up so much before its parent does, so that who is absent is named by the one
# who waits for it, not by those above.
_MARGIN_S = 0.5
_RANK = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Ballot:
    """One save's keys in ``store`` as one rank sees them.

    Attributes:
        store: any ``dist.Store``; only set, get, add, check and delete_key are used.
        uuid: of the save.
        rank: rank in the group that saves.
        world_size: of that group.
        deadline: on the clock of ``time.monotonic``.
        pause: sleeps for the seconds given, and raises if the save was cancelled.
    """

    store: Store
    uuid: str
    rank: int
    world_size: int
    deadline: float
    pause: Callable[[float], None]

    def report(self, record: bytes) -> dict[int, bytes]:
        """Tell that this rank's files are durable; ``record`` is as long on every rank.

        Returns:
            On rank 0, every rank's record; elsewhere nothing.

        Raises:
            SaveFailed: a rank failed, or is absent at the deadline; the message names it.
        """
        rows = {self.rank: record}
        children = self._children()
        keys = [self._done(rank) for rank in children]
        if keys:
            self._wait(lambda: self.store.check(keys), self._absent, self._height() * _MARGIN_S)
        self.raise_if_failed()
        step = _RANK.size + len(record)
        for key in keys:
            data = self.store.get(key)
            for at in range(0, len(data), step):
                (rank,) = _RANK.unpack(data[at : at + _RANK.size])
                rows[rank] = data[at + _RANK.size : at + step]
            self.store.delete_key(key)
        if self.rank == 0:
            return rows
        told = b"".join(_RANK.pack(rank) + rows[rank] for rank in sorted(rows))
        self.store.set(self._done(self.rank), told)  # type: ignore[arg-type]  # bytes are taken
        return {}

    def fail(self, text: str) -> None:
        """Tell all ranks that this save can't be committed; the first cause stays."""
        key = self._key("failed")
        if not self.store.check([key]):
            self.store.set(key, f"rank {self.rank}: {text}")

    def announce(self, outcome: dict[str, Any]) -> None:
        """On rank 0: publish what came of the save."""
        if self.world_size > 1:
            self.store.set(self._key("outcome"), json.dumps(outcome))

    def outcome(self) -> dict[str, Any]:
        """On the other ranks: wait for rank 0's word; the last to read deletes it.

        Raises:
            SaveFailed: it did not come in time, or a rank failed.
        """
        key = self._key("outcome")
        self._wait(lambda: self.store.check([key]), lambda: "rank 0, which commits")
        found: dict[str, Any] = json.loads(self.store.get(key))
        if self.store.add(self._key("seen"), 1) == self.world_size - 1:
            for name in ("outcome", "seen", "failed"):
                self.store.delete_key(self._key(name))
        return found

    def raise_if_failed(self) -> None:
        """Raise if a rank called ``fail``."""
        key = self._key("failed")
        if self.store.check([key]):
            raise SaveFailed(f"nothing was committed: {self.store.get(key).decode()}")

    def _wait(
        self, ready: Callable[[], bool], absent: Callable[[], str], margin_s: float = 0.0
    ) -> None:
        left_s = self.deadline - time.monotonic()
        until = self.deadline - min(margin_s, left_s / 4)
        pause_s, failed = _POLL_FIRST_S, self._key("failed")
        while not ready():
            if self.store.check([failed]) and not ready():
                self.raise_if_failed()
            if time.monotonic() > until:
                raise SaveFailed(f"nothing was committed: no word in time from {absent()}")
            self.pause(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MOST_S)

    def _children(self) -> range:
        first = self.rank * FAN_IN + 1
        return range(min(first, self.world_size), min(first + FAN_IN, self.world_size))

    def _height(self) -> int:
        """Levels of ranks above this one."""
        height, rank = 0, self.rank
        while rank:
            rank, height = (rank - 1) // FAN_IN, height + 1
        return height

    def _absent(self) -> str:
        absent = [rank for rank in self._children() if not self.store.check([self._done(rank)])]
        return f"ranks {absent}"

    def _done(self, rank: int) -> str:
        return self._key(f"done/{rank}")

    def _key(self, name: str) -> str:
        return f"pt214_dcp/{self.uuid}/{name}"
