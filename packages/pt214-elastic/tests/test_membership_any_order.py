"""The pure machine under any order of events: members that keep to the protocol, driven at random.

Invariants: epochs rise by one; no applied step is undone; nobody finishes a step without complete
gradients of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pt214_elastic import membership
from pt214_elastic.membership import Phase, State
from pt214_elastic.records import (
    End,
    Event,
    Joined,
    Lost,
    NewEpoch,
    Record,
    Reported,
    Standing,
    Suspected,
)


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
