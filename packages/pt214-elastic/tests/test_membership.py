"""The pure machine: invariants under any order of events, and each verdict by hand."""

from __future__ import annotations

from dataclasses import replace

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


def test_a_fault_names_the_lost_and_the_epoch() -> None:
    _, messages = play(running(3), Lost(1))
    assert messages == [Fault((0, 2), 1, (1,))]
