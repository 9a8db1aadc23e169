"""The words of membership: what members report, what comes in, what goes out.

Plain frozen data, shared by the pure machine (``membership``), the coordinator and its clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """What becomes of the step that was under way."""

    FINISH = "finish"
    REPEAT = "repeat"


@dataclass(frozen=True, slots=True)
class Standing:
    """What a member says of itself when it stops at a boundary or after a fault."""

    handle: str = ""
    committed: int = 0
    complete: bool = False
    filled: bool = True  # False: admitted, but the state's copy never arrived whole
    hold_world: int = 0  # wait at this boundary for so many ranks ...
    hold_until_s: float = 0.0  # ... but no longer than this, on the clock of Tick
    done: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One epoch, as all of its members must see it."""

    epoch: int
    members: tuple[tuple[int, str], ...]  # (member id, reconfigure handle); rank is the position
    base_step: int
    verdict: Verdict
    fill: tuple[int, ...]  # members that receive the state ...
    source: int | None  # ... from this one
    again: bool  # regroup at the next boundary: joiners wait, or ranks are too few

    @property
    def uuid(self) -> int:
        """Names the communicator; epochs are never reused, so neither is this."""
        return self.epoch


@dataclass(frozen=True, slots=True)
class Joined:
    """A process has a model ready and asks to enter."""

    member: int
    handle: str


@dataclass(frozen=True, slots=True)
class Reported:
    """A member of ``epoch`` stands still and waits for the next record."""

    member: int
    epoch: int
    standing: Standing


@dataclass(frozen=True, slots=True)
class Lost:
    """A member is dead, hung, or left with an error: proven by its launcher or itself."""

    member: int


@dataclass(frozen=True, slots=True)
class Left:
    """A member went of its own will, with nothing wrong."""

    member: int


@dataclass(frozen=True, slots=True)
class Suspected:
    """A member's collective failed; nobody need be dead, but ``epoch`` is broken."""

    member: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """The clock says so."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Supply:
    """Whether anybody outside the group may still come: a process starting, or a restart left."""

    can_grow: bool


Event = Supply | Joined | Reported | Lost | Left | Suspected | Tick


@dataclass(frozen=True, slots=True)
class Fault:
    """To ``to``: ``epoch`` is broken; get out of its collectives and report."""

    to: tuple[int, ...]
    epoch: int
    lost: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """To all its members: form this group."""

    record: Record


@dataclass(frozen=True, slots=True)
class Regroup:
    """To ``to``: somebody waits to enter; vote for a regroup at the next boundary."""

    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """To ``to``: every member is done and the group stands."""

    to: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class End:
    """To everybody: the job is over."""

    ok: bool
    reason: str


Message = Fault | NewEpoch | Regroup | Finished | End
