"""In the background: who has written, and whether it was committed, told through the store.

    each rank  done/<rank>  ->  rank 0 commits  ->  outcome  ->  all ranks; the last one deletes it

Keys carry the save's uuid, so a save that died leaves nothing that a later one could take for its
own. The store is only polled: a blocking wait would hold a TCPStore client that training needs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pt214_dcp.errors import SaveFailed
from pt214_dcp.manifest import RankRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Between two looks at the store: short first, then rare enough for thousands of ranks. Not tuned.
_POLL_FIRST_S, _POLL_MOST_S = 0.005, 0.25


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

    def report(self, record: RankRecord) -> None:
        """Tell rank 0 that this rank's files are durable."""
        row = [record.manifest_bytes, record.manifest_digest, record.data_bytes]
        self.store.set(self._done(self.rank), json.dumps(row))

    def fail(self, text: str) -> None:
        """Tell all ranks that this save can't be committed; lost stores are no news here."""
        self.store.set(self._key("failed"), f"rank {self.rank}: {text}")

    def collect(self) -> list[RankRecord]:
        """On rank 0: wait until all have reported.

        Raises:
            SaveFailed: a rank failed, or is absent at the deadline; the message names it.
        """
        keys = [self._done(rank) for rank in range(self.world_size)]
        self._wait(lambda: self.store.check(keys), self._absent)
        self.raise_if_failed()
        records = [RankRecord(*json.loads(self.store.get(key))) for key in keys]
        for key in keys:
            self.store.delete_key(key)
        return records

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

    def _wait(self, ready: Callable[[], bool], absent: Callable[[], str]) -> None:
        pause_s, failed = _POLL_FIRST_S, self._key("failed")
        while not ready():
            if self.store.check([failed]) and not ready():
                self.raise_if_failed()
            if time.monotonic() > self.deadline:
                raise SaveFailed(f"nothing was committed: no word in time from {absent()}")
            self.pause(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MOST_S)

    def _absent(self) -> str:
        ranks = range(self.world_size)
        absent = [rank for rank in ranks if not self.store.check([self._done(rank)])]
        return f"ranks {absent}"

    def _done(self, rank: int) -> str:
        return self._key(f"done/{rank}")

    def _key(self, name: str) -> str:
        return f"pt214_dcp/{self.uuid}/{name}"
