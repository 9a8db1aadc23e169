"""What happened when, as the launcher saw it: one frozen record an event, one JSON line each.

Times are ``time.monotonic()``: one clock for all processes of a host, never set back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The kinds of event; a ``StrEnum``, so ``event.kind == "commit"`` reads well."""

    SPAWN = "spawn"
    EXIT = "exit"
    FAULT = "fault"
    RELEASED = "released"
    EPOCH = "epoch"
    COMMIT = "commit"
    REPEAT = "repeat"
    JOIN = "join"
    CUSTOM = "custom"
    END = "end"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job.

    Attributes:
        kind: see :class:`Kind`.
        member: the member it is about, ``None`` for the whole job.
        rank: that member's rank in ``epoch``, where it has one.
        epoch: number of the epoch it happened in; 0 before the first.
        step: the training step, where there is one.
        data: more, by kind: ``exit`` has ``how``, ``epoch`` has ``members`` and ``world_size``,
            ``released`` has ``after_s``, ``custom`` has ``name`` and what ``emit`` was given.
        time_s: ``time.monotonic()`` when the launcher noted it.
        wall_s: ``time.time()`` at the same moment.
    """

    kind: Kind
    member: int | None = None
    rank: int | None = None
    epoch: int = 0
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    time_s: float = field(default_factory=time.monotonic)
    wall_s: float = field(default_factory=time.time)

    def to_json(self) -> str:
        """One line of JSON, without the newline."""
        names = ("time_s", "wall_s", "kind", "member", "rank", "epoch", "step")
        plain: dict[str, Any] = {name: getattr(self, name) for name in names}
        return json.dumps({**plain, "data": dict(self.data)}, default=str)
