"""Which rank is it that all others wait for, and has it hung: pure decisions on what was seen.

    one rank inside a step, every other further on than it, nobody moves
        -> suspicion; clocks run while nothing changes: idle_s (it uses no CPU), waited_s
        -> hung once idle_s >= Limits.idle_s or waited_s >= Limits.busy_s

A position is (step, operations begun in it), and an operation needs all ranks: who is further on
and does not move waits for the one behind. So does who stands between epochs.

Slowness alone accuses nobody: a long compile uses CPU and gets the larger limit; a rank between
steps may evaluate or save for as long as it likes; where two ranks are behind, neither is accused,
since each may wait for the other. A look that comes late counts as one of ``MAX_LOOK_S``: a
launcher that was itself stopped for long has seen nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

BUSY_SHARE = 0.05  # of a core between two looks: less is idling; not tuned yet
MAX_LOOK_S = 2.0  # two looks further apart count as so far apart


class Where(Enum):
    """Where a member stands."""

    OUTSIDE = "outside"  # of a step: evaluation, saves, set-up
    INSIDE = "inside"
    BOUNDARY = "boundary"  # reported, and waits for the others


@dataclass(frozen=True, slots=True)
class View:
    """One look at one member.

    Attributes:
        where: it stands.
        position: (step, operations begun in it), where it is inside.
        moves: changes whenever it enters or leaves anything.
    """

    where: Where
    position: tuple[int, int]
    moves: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How long all others may wait for one member.

    Attributes:
        idle_s: while it uses no CPU.
        busy_s: in all; at least ``idle_s``.
    """

    idle_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A member that all others have been waiting for, with nothing moving."""

    member: int
    scene: tuple[tuple[int, View], ...]
    cpu_s: float
    waited_s: float = 0.0
    idle_s: float = 0.0


def late(views: Mapping[int, View]) -> int | None:
    """The only member that all others wait for, if it is inside a step."""
    inside = {member: v for member, v in views.items() if v.where is Where.INSIDE}
    if len(views) < 2 or not inside or any(v.where is Where.OUTSIDE for v in views.values()):
        return None
    least = min(view.position for view in inside.values())
    behind = [member for member, view in inside.items() if view.position == least]
    return behind[0] if len(behind) == 1 else None


def weigh(
    before: Suspicion | None, views: Mapping[int, View], member: int, cpu_s: float, since_s: float
) -> Suspicion:
    """The suspicion after one more look at the late ``member``.

    Args:
        before: of the last look.
        views: of all members.
        member: whom :func:`late` named.
        cpu_s: CPU time of the member and its children, in all.
        since_s: since the last look.
    """
    scene = tuple(sorted(views.items(), key=lambda item: item[0]))
    if before is None or (before.member, before.scene) != (member, scene):
        return Suspicion(member, scene, cpu_s)
    passed_s = min(since_s, MAX_LOOK_S)
    is_busy = cpu_s - before.cpu_s >= BUSY_SHARE * passed_s
    return replace(
        before,
        cpu_s=cpu_s,
        waited_s=before.waited_s + passed_s,
        idle_s=0.0 if is_busy else before.idle_s + passed_s,
    )


def is_hung(suspicion: Suspicion, limits: Limits) -> bool:
    """Whether the suspicion has become a verdict."""
    return suspicion.idle_s >= limits.idle_s or suspicion.waited_s >= limits.busy_s
