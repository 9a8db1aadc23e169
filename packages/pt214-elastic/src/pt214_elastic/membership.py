"""Who trains together, and what becomes of an interrupted step: a pure state machine.

    GATHERING --enough joined--> RUNNING --lost/suspected--> FAULTED --all reported--> RUNNING
                                 RUNNING --all at a boundary reported--> RUNNING (joiners enter)
                                 RUNNING --all done--> FINISHED          any --> ENDED

No socket, clock or tensor is here: ``step(state, event) -> (state, messages)``; time comes in as
:class:`Tick`. Each new epoch is one :class:`Record`, sent whole to every member of it.

Finish or repeat. A report tells how many steps a member has applied (``committed``) and whether
it holds complete gradients of the next one (``complete``). The record's base step is

    base = min over survivors of (committed + complete)

A member one short of it finishes its step with the gradients it kept, the others repeat theirs.
A vote that passed on one member proves complete gradients on all, so nobody is ever ahead of
``base``. Bound members report the same until they have applied the step: a second fault in the
middle of recovery therefore comes to the same verdict.

Invariants: epochs rise by one; members of an epoch hold the same record; base never falls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from pt214_elastic.records import (
    End,
    Event,
    Fault,
    Finished,
    Joined,
    Left,
    Lost,
    Message,
    NewEpoch,
    Record,
    Regroup,
    Reported,
    Standing,
    Supply,
    Suspected,
    Tick,
    Verdict,
)

_NOBODY: Mapping[int, Standing] = MappingProxyType({})


class Phase(Enum):
    """Where a job stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    FAULTED = "faulted"
    FINISHED = "finished"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows of a job's membership.

    Attributes:
        target: ranks wanted; joiners beyond it wait as spares.
        min_ranks: fewer than these train no step.
        patience_s: how long too few ranks wait for joiners.
        can_grow: whether somebody spawns replacements; if not, too few ranks end at once.
    """

    target: int
    min_ranks: int = 1
    patience_s: float = 120.0
    can_grow: bool = True
    now_s: float = 0.0
    phase: Phase = Phase.GATHERING
    epoch: int = 0
    base_step: int = 0
    members: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    reports: Mapping[int, Standing] = field(default_factory=lambda: _NOBODY)
    joiners: Mapping[int, Standing] = field(default_factory=lambda: _NOBODY)
    deadline_s: float | None = None


def step(state: State, event: Event) -> tuple[State, list[Message]]:
    """Take one event; return the new state and what to send, in order."""
    if state.phase is Phase.ENDED:
        return state, []
    messages: list[Message] = []
    match event:
        case Tick(now_s):
            state = replace(state, now_s=max(now_s, state.now_s))
        case Supply(can_grow):
            state = replace(state, can_grow=can_grow)
        case Joined(member, handle):
            if member not in state.members:
                state = replace(state, joiners={**state.joiners, member: Standing(handle)})
                if state.phase is Phase.RUNNING and len(state.members) < state.target:
                    messages.append(Regroup(state.members))
        case Reported(member, epoch, standing):
            if epoch == state.epoch and member in state.members:
                state = replace(state, reports={**state.reports, member: standing})
        case Lost(member):
            state, messages = _without(state, member, is_fault=member in state.members)
        case Left(member):
            harmless = state.phase is Phase.FINISHED or set(state.members) <= {member}
            state, messages = _without(state, member, is_fault=not harmless)
        case Suspected(member, epoch):
            if epoch == state.epoch and member in state.members:
                state, messages = _broken(state, ())
    return _settle(state, messages)


def _without(state: State, member: int, *, is_fault: bool) -> tuple[State, list[Message]]:
    inside = member in state.members
    state = replace(
        state,
        members=tuple(item for item in state.members if item != member),
        reports={key: value for key, value in state.reports.items() if key != member},
        joiners={key: value for key, value in state.joiners.items() if key != member},
    )
    if not inside:
        return state, []
    if not state.members:
        if not is_fault or state.phase is Phase.FINISHED:
            return replace(state, phase=Phase.ENDED), [End(not is_fault, "every member left")]
        return _ended(state, "the last member that held the training state is lost")
    return _broken(state, (member,)) if is_fault else (state, [])


def _broken(state: State, lost: tuple[int, ...]) -> tuple[State, list[Message]]:
    news = state.phase is not Phase.FAULTED or bool(lost)
    state = replace(state, phase=Phase.FAULTED, lost=state.lost + lost)
    return state, [Fault(state.members, state.epoch, state.lost)] if news else []


def _ended(state: State, reason: str) -> tuple[State, list[Message]]:
    return replace(state, phase=Phase.ENDED), [End(False, reason)]


def _settle(state: State, messages: list[Message]) -> tuple[State, list[Message]]:
    """Form the next epoch where everybody it needs has reported."""
    if state.phase is Phase.ENDED:
        return state, messages
    if state.epoch == 0:
        state, more = _gather(state)
    elif state.members and all(member in state.reports for member in state.members):
        state, more = _reform(state)
    else:
        return state, messages
    return state, messages + more


def _gather(state: State) -> tuple[State, list[Message]]:
    """Before the first epoch: wait for all, then for as many as will do."""
    if not state.joiners:
        return state, []
    if len(state.joiners) >= state.target:
        return _form(state, (), tuple(sorted(state.joiners))[: state.target], (), 0)
    return _wait_for_ranks(state, len(state.joiners), at_least=state.min_ranks)


def _wait_for_ranks(state: State, world: int, at_least: int) -> tuple[State, list[Message]]:
    if state.deadline_s is None:
        state = replace(state, deadline_s=state.now_s + state.patience_s)
    assert state.deadline_s is not None
    if state.now_s < state.deadline_s and state.can_grow:
        return state, []
    if state.epoch == 0 and world >= at_least:
        return _form(state, (), tuple(sorted(state.joiners)), (), 0)
    late = f"nobody came within {state.patience_s:g} s" if state.can_grow else "no process is left"
    return _ended(
        state,
        f"world_size={world} is below min_ranks={at_least} and {late} to raise it; lower min_ranks,"
        f" or allow more max_restarts or patience_s (now {state.patience_s:g} s)",
    )


def base_step_of(holders: Sequence[Standing]) -> int:
    """How many steps count for everybody: what every survivor has applied or can apply."""
    return min(item.committed + item.complete for item in holders)


def _reform(state: State) -> tuple[State, list[Message]]:
    reports = [state.reports[member] for member in state.members]
    holders = [item for item in reports if item.filled]
    if not holders:
        return _start_again(state)
    base = base_step_of(holders)
    ahead = max(item.committed for item in holders)
    if ahead > base or base < state.base_step:
        return _ended(state, f"a member has applied step {ahead} and another cannot: base {base}")
    survivors = tuple(m for m in state.members if state.reports[m].filled)
    hollow = {m: state.reports[m] for m in state.members if not state.reports[m].filled}
    state = replace(state, members=survivors, joiners={**state.joiners, **hollow})
    at_boundary = all(item.committed == base for item in holders)
    if not at_boundary:  # nobody may copy state that a finishing step is about to change
        return _form(state, survivors, (), survivors, base)
    if all(item.done for item in holders) and state.phase is not Phase.FAULTED:
        return replace(state, phase=Phase.FINISHED, reports={}), [Finished(survivors, state.epoch)]
    room = max(0, state.target - len(survivors))
    entering = tuple(sorted(state.joiners))[:room]
    world = len(survivors) + len(entering)
    if world < state.min_ranks:
        return _wait_for_ranks(state, world, state.min_ranks)
    held = max(item.hold_world if item.hold_until_s > state.now_s else 0 for item in holders)
    if world < min(held, state.target) and state.phase is not Phase.FAULTED:
        return state, []
    return _form(state, survivors, entering, survivors, base)


def _start_again(state: State) -> tuple[State, list[Message]]:
    """The first group never stood: where no step was applied, every member's own state will do."""
    if state.base_step > 0:
        return _ended(state, "no living member holds the training state")
    entering = tuple(sorted(state.joiners))[: max(0, state.target - len(state.members))]
    world = len(state.members) + len(entering)
    if world < state.min_ranks:
        return _wait_for_ranks(state, world, state.min_ranks)
    return _form(state, state.members, entering, (), 0)


def _form(
    state: State,
    survivors: tuple[int, ...],
    entering: tuple[int, ...],
    holders: tuple[int, ...],
    base: int,
) -> tuple[State, list[Message]]:
    known = {**state.joiners, **state.reports}
    members = survivors + entering
    finishing = any(state.reports[member].committed < base for member in survivors)
    waiting = {key: value for key, value in state.joiners.items() if key not in members}
    short = len(members) < state.target
    record = Record(
        epoch=state.epoch + 1,
        members=tuple((member, known[member].handle) for member in members),
        base_step=base,
        verdict=Verdict.FINISH if finishing else Verdict.REPEAT,
        fill=entering if holders else (),
        source=holders[0] if holders and entering else None,
        again=(bool(waiting) and short) or len(members) < state.min_ranks,
    )
    state = replace(
        state,
        phase=Phase.RUNNING,
        epoch=record.epoch,
        base_step=base,
        members=members,
        lost=(),
        reports={},
        joiners=waiting,
        deadline_s=None,
    )
    return state, [NewEpoch(record)]
