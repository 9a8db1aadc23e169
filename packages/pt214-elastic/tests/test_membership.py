"""The pure machine: invariants under any order of events, and each verdict by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pt214_elastic import membership
from pt214_elastic.membership import Phase, State, step
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


def play(state: State, *events: Event) -> tuple[State, list[Message]]:
    messages: list[Message] = []
    for event in events:
        state, more = step(state, event)
        messages += more
    return state, messages


def running(world: int, target: int | None = None, min_ranks: int = 1) -> State:
    state = State(target=world, min_ranks=min_ranks)
    state, _ = play(state, *[Joined(member, f"h{member}") for member in range(world)])
    assert state.phase is Phase.RUNNING
    return replace(state, target=target or world)


def record_of(messages: list[Message]) -> Record:
    found = [message.record for message in messages if isinstance(message, NewEpoch)]
    assert len(found) == 1, messages
    return found[0]


def report(member: int, epoch: int, committed: int, complete: bool = False) -> Reported:
    return Reported(member, epoch, Standing(f"h{member}", committed, complete))


def test_the_first_epoch_waits_for_all_ranks() -> None:
    state, messages = play(State(target=3), Joined(2, "c"), Joined(0, "a"))
    assert not messages
    state, messages = play(state, Joined(1, "b"))
    assert record_of(messages).members == ((0, "a"), (1, "b"), (2, "c"))
    assert state.epoch == 1


def test_a_step_is_finished_only_if_all_survivors_hold_complete_gradients() -> None:
    state, _ = play(running(3), Lost(1))
    _, messages = play(state, report(0, 1, 7, complete=True), report(2, 1, 7, complete=True))
    assert record_of(messages).verdict is Verdict.FINISH
    assert record_of(messages).base_step == 8
    _, messages = play(state, report(0, 1, 7, complete=True), report(2, 1, 7))
    assert record_of(messages).verdict is Verdict.REPEAT
    assert record_of(messages).base_step == 7


def test_a_member_that_applied_the_step_makes_the_others_finish_it() -> None:
    state, _ = play(running(3), Lost(1))
    _, messages = play(state, report(0, 1, 8), report(2, 1, 7, complete=True))
    record = record_of(messages)
    assert (record.verdict, record.base_step) == (Verdict.FINISH, 8)


def test_a_second_fault_in_recovery_comes_to_the_same_verdict() -> None:
    state, _ = play(running(4), Lost(3), *[report(m, 1, 5, complete=True) for m in range(3)])
    # Member 0 applied the step and moved on; 1 still stands in it, bound; 2 dies meanwhile.
    state, messages = play(state, Lost(2), report(1, 2, 5, complete=True), report(0, 2, 6))
    record = record_of(messages)
    assert (record.epoch, record.base_step, record.verdict) == (3, 6, Verdict.FINISH)
    assert [member for member, _ in record.members] == [0, 1]


def test_nobody_enters_while_a_step_is_finished() -> None:
    state, _ = play(running(3), Lost(1), Joined(9, "h9"))
    _, messages = play(state, report(0, 1, 7, complete=True), report(2, 1, 7, complete=True))
    record = record_of(messages)
    assert record.fill == ()
    assert record.again  # but at the very next boundary


def test_a_joiner_enters_with_a_repeated_step_and_is_filled_by_a_survivor() -> None:
    state, _ = play(running(3), Lost(0), Joined(9, "h9"))
    _, messages = play(state, report(1, 1, 7), report(2, 1, 7))
    record = record_of(messages)
    assert [member for member, _ in record.members] == [1, 2, 9]
    assert (record.fill, record.source) == ((9,), 1)


def test_a_joiner_makes_running_members_regroup_at_a_boundary() -> None:
    state, messages = play(running(2, target=3), Joined(9, "h9"))
    assert messages == [Regroup((0, 1))]
    _, messages = play(state, report(0, 1, 4), report(1, 1, 4))
    assert record_of(messages).fill == (9,)


def test_a_spare_is_not_admitted_while_the_world_is_whole() -> None:
    state, messages = play(running(2), Joined(9, "h9"))
    assert not messages
    state, messages = play(state, Lost(1), report(0, 1, 3))
    assert record_of(messages).fill == (9,)


def test_a_member_whose_copy_failed_is_filled_again() -> None:
    state, _ = play(running(2, target=3), Joined(9, "h9"), report(0, 1, 4), report(1, 1, 4))
    hollow = Reported(9, 2, Standing("h9", filled=False))
    _, messages = play(state, Lost(0), hollow, report(1, 2, 4))
    record = record_of(messages)
    assert (record.fill, record.source) == ((9,), 1)


def test_too_few_ranks_wait_for_a_joiner_and_end_when_none_comes() -> None:
    state, messages = play(running(2, min_ranks=2), Lost(1), report(0, 1, 3))
    assert not any(isinstance(message, NewEpoch | End) for message in messages)
    _, messages = play(state, Joined(9, "h9"))
    assert record_of(messages).fill == (9,)
    _, messages = play(state, Tick(state.patience_s + 1))
    assert isinstance(messages[0], End)
    assert "world_size=1 is below min_ranks=2" in messages[0].reason
    assert "nobody came within 120 s" in messages[0].reason


def test_too_few_ranks_end_at_once_when_nobody_can_come() -> None:
    state, _ = play(running(2, min_ranks=2), Supply(False), Lost(1))
    _, messages = play(state, report(0, 1, 3))
    assert isinstance(messages[0], End)
    assert "no process is left to raise it" in messages[0].reason


def test_a_first_group_that_never_stood_is_formed_again() -> None:
    """Nobody holds a state then, and nobody needs to: each has the one it started with."""
    hollow = Standing("h", filled=False)
    state, _ = play(running(3), Joined(9, "h9"), Lost(1))
    _, messages = play(state, Reported(0, 1, hollow), Reported(2, 1, hollow))
    record = record_of(messages)
    assert [member for member, _ in record.members] == [0, 2, 9]
    assert (record.base_step, record.fill, record.source) == (0, (), None)
    later = replace(state, base_step=4)
    _, messages = play(later, Reported(0, 1, hollow), Reported(2, 1, hollow))
    assert isinstance(messages[-1], End)
    assert "no living member holds the training state" in messages[-1].reason


def test_a_first_group_below_min_ranks_waits() -> None:
    hollow = Standing("h", filled=False)
    state, messages = play(running(2, min_ranks=2), Lost(1), Reported(0, 1, hollow))
    assert not any(isinstance(message, NewEpoch | End) for message in messages)
    assert len(record_of(play(state, Joined(9, "h9"))[1]).members) == 2


def test_the_job_ends_when_nobody_holds_the_state() -> None:
    state, messages = play(running(2), Lost(0), Lost(1))
    assert isinstance(messages[-1], End)
    assert "last member" in messages[-1].reason
    assert state.phase is Phase.ENDED


def test_a_late_suspicion_of_an_old_epoch_is_dropped() -> None:
    state, _ = play(running(2), Suspected(0, 1), report(0, 1, 0), report(1, 1, 0))
    assert state.epoch == 2
    _, messages = play(state, Suspected(0, 1), report(1, 1, 0))
    assert not messages


def test_all_done_finishes_and_leaving_is_no_fault_then() -> None:
    done = Standing("h", 9, done=True)
    state, messages = play(running(2), Reported(0, 1, done), Reported(1, 1, done))
    assert messages == [Finished((0, 1), 1)]
    state, messages = play(state, Left(0))
    assert not messages
    _, messages = play(state, Left(1))
    assert messages == [End(True, "every member left")]


def test_waiting_for_a_world_holds_the_boundary_until_a_joiner_or_the_time() -> None:
    held = Standing("h", 4, hold_world=3, hold_until_s=50.0)
    state, messages = play(running(2, target=3), Reported(0, 1, held), Reported(1, 1, held))
    assert not messages
    assert record_of(play(state, Joined(9, "h9"))[1]).fill == (9,)
    assert record_of(play(state, Tick(51.0))[1]).fill == ()


# -- any order of events ------------------------------------------------------------------------


class World:
    """Members that keep to the protocol, driven by arbitrary choices; checks as it goes."""

    def __init__(self, target: int, min_ranks: int) -> None:
        self.state = State(target=target, min_ranks=min_ranks)
        self.records: dict[int, Record] = {}
        self.epoch: dict[int, int] = {}  # as each member knows it
        self.committed: dict[int, int] = {}
        self.complete: dict[int, bool] = {}
        self.stopped: set[int] = set()  # reported, waiting
        self.next = 0

    def tell(self, event: Event) -> None:
        before = self.state
        self.state, messages = membership.step(before, event)
        assert self.state.epoch - before.epoch in (0, 1)
        assert self.state.base_step >= before.base_step
        for message in messages:
            if isinstance(message, NewEpoch):
                self.enter(message.record)
            elif isinstance(message, End):
                assert "another cannot" not in message.reason

    def enter(self, record: Record) -> None:
        assert record.epoch not in self.records
        assert record.epoch == self.state.epoch
        self.records[record.epoch] = record
        assert len({member for member, _ in record.members}) == len(record.members)
        for member, _ in record.members:
            if member in record.fill or record.epoch == 1:
                self.committed[member], self.complete[member] = record.base_step, False
            elif self.committed[member] < record.base_step:
                assert self.complete[member], "told to finish a step without its gradients"
                assert self.committed[member] == record.base_step - 1
            else:
                assert self.committed[member] == record.base_step, "an applied step is undone"
                self.complete[member] = False
            self.epoch[member] = record.epoch
            self.stopped.discard(member)

    def members(self) -> list[int]:
        return [m for m in self.state.members if self.epoch.get(m) == self.state.epoch]

    def reduce(self, pick: int) -> None:
        """One member's gradients are complete: possible only while nobody is behind."""
        moving = [m for m in self.members() if m not in self.stopped]
        if not moving or self.state.phase is not Phase.RUNNING:
            return
        member = moving[pick % len(moving)]
        low = min(self.committed[m] for m in self.members())
        if self.committed[member] == low:
            self.complete[member] = True

    def apply(self, pick: int) -> None:
        """One member's vote passed: possible only when all have complete gradients."""
        moving = [m for m in self.members() if m not in self.stopped]
        if not moving or self.state.phase not in (Phase.RUNNING, Phase.FAULTED):
            return
        member = moving[pick % len(moving)]
        at = self.committed[member]
        ready = all(self.committed[m] + self.complete[m] > at for m in self.members())
        if self.complete[member] and ready:
            self.committed[member], self.complete[member] = at + 1, False

    def report(self, pick: int) -> None:
        members = self.members()
        if members and self.state.phase is Phase.FAULTED:
            member = members[pick % len(members)]
            self.stopped.add(member)
            standing = Standing("h", self.committed[member], self.complete[member])
            self.tell(Reported(member, self.epoch[member], standing))

    def join(self) -> None:
        self.next += 1
        self.tell(Joined(self.next, "h"))

    def lose(self, pick: int) -> None:
        everybody = [*self.state.members, *self.state.joiners]
        if everybody:
            self.tell(Lost(everybody[pick % len(everybody)]))

    def suspect(self, pick: int) -> None:
        if self.state.members:
            member = self.state.members[pick % len(self.state.members)]
            self.tell(Suspected(member, self.state.epoch - pick % 2))


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["reduce", "reduce", "apply", "report", "report", "report", "join", "lose", "suspect"]
        ),
        st.integers(0, 7),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(ACTIONS, st.integers(1, 4), st.integers(1, 3))
def test_epochs_rise_by_one_and_no_applied_step_is_undone(
    actions: list[tuple[str, int]], target: int, min_ranks: int
) -> None:
    world = World(target, min(min_ranks, target))
    for _ in range(target):
        world.join()
    for name, pick in actions:
        if name == "join":
            world.join()
        else:
            getattr(world, name)(pick)


def test_deciding_by_the_quickest_member_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saboteur: "any survivor is complete" finishes steps that others cannot finish."""

    def quickest(holders: Sequence[Standing]) -> int:
        return max(item.committed + item.complete for item in holders)

    monkeypatch.setattr(membership, "base_step_of", quickest)
    world = World(target=3, min_ranks=1)
    for _ in range(3):
        world.join()
    world.reduce(0)
    world.lose(1)
    world.report(0)
    with pytest.raises(AssertionError, match="without its gradients"):
        world.report(1)


def test_a_fault_names_the_lost_and_the_epoch() -> None:
    _, messages = play(running(3), Lost(1))
    assert messages == [Fault((0, 2), 1, (1,))]
