"""What ranks tell each other in the foreground of a save or load, with an end to every wait.

    all ranks enter the same collective  --or, at the deadline-->  RankLost, with who is absent

A collective that hangs says nothing of why. So a rank that has waited for half a second leaves a
mark in the default store, and whoever gives up names the ranks that left none: those that never
came. Marks are few and rare: none is left while all come in time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pt214_dcp.compat import default_store, exchange_device, gather_single
from pt214_dcp.errors import BadOption, RankLost

logger = logging.getLogger(__name__)

TIMEOUT_S = 600.0  # for ranks that never report; as torch's own collectives on the CPU, rounded
MARK_AFTER_S = 0.5
_POLL_FIRST_S, _POLL_MOST_S = 2e-5, 0.01  # a collective of bytes takes some 0.2 ms on one host
_NAMED = 16  # absent ranks in a message, before "and more"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who takes part.

    Attributes:
        rank: this rank's number in the group.
        global_ranks: the global rank of each.
        group: None for a process alone.
        timeout_s: seconds that one exchange waits for the others.
    """

    rank: int
    global_ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    timeout_s: float = TIMEOUT_S

    @property
    def world_size(self) -> int:
        """Ranks in the group; 1 without one."""
        return len(self.global_ranks)


def members(
    process_group: dist.ProcessGroup | None, *, alone: bool = False, timeout_s: float = TIMEOUT_S
) -> Ranks:
    """The ranks of ``process_group``, of the default group, or this process alone.

    Raises:
        BadOption: ``timeout_s`` is not above 0.
        ValueError: this rank is not in the group.
    """
    check_timeout(timeout_s)
    if alone or not (dist.is_available() and dist.is_initialized()):
        return Ranks(0, (0,), None, timeout_s)
    group = process_group or dist.distributed_c10d._get_default_group()
    if dist.get_rank(group) < 0:
        raise ValueError("process_group does not hold this rank; call on its members only")
    everyone = tuple(dist.get_process_group_ranks(group))
    return Ranks(dist.get_rank(group), everyone, group, timeout_s)


def check_timeout(timeout_s: float) -> None:
    """Raise BadOption unless ``timeout_s`` is above 0."""
    if not timeout_s > 0:
        raise BadOption(f"timeout_s is {timeout_s!r}; it must be above 0 seconds")


def exchange(ranks: Ranks, mine: bytes) -> list[bytes]:
    """``mine`` of every rank, in their order; all must be equally long.

    Raises:
        RankLost: a rank is absent or lost.
    """
    if ranks.group is None or ranks.world_size == 1:
        return [mine]
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(exchange_device(ranks.group))
    found = torch.empty(len(mine) * ranks.world_size, dtype=torch.uint8, device=sent.device)
    _together(ranks, gather_single, found, sent)
    data, step = found.cpu().numpy().tobytes(), len(mine)
    return [data[at : at + step] for at in range(0, len(data), step)]


def summed(ranks: Ranks, numbers: Sequence[int]) -> list[int]:
    """The sum of each of ``numbers`` over all ranks, which give equally many.

    Raises:
        RankLost: a rank is absent or lost.
    """
    if ranks.group is None or ranks.world_size == 1:
        return list(numbers)
    found = torch.tensor(numbers, dtype=torch.int64, device=exchange_device(ranks.group))
    _together(ranks, dist.all_reduce, found)
    return [int(number) for number in found.tolist()]


def broadcast(ranks: Ranks, mine: bytes, source: int) -> bytes:
    """``mine`` of the rank ``source``, on every rank; of any length.

    Raises:
        RankLost: a rank is absent or lost.
    """
    length = int.from_bytes(exchange(ranks, len(mine).to_bytes(8, "little"))[source], "little")
    if ranks.group is None or ranks.world_size == 1 or length == 0:
        return mine[:length]
    data = torch.zeros(length, dtype=torch.uint8, device=exchange_device(ranks.group))
    if ranks.rank == source:
        data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    _together(ranks, dist.broadcast, data, ranks.global_ranks[source])
    return data.cpu().numpy().tobytes()


def _together(ranks: Ranks, collective: Any, *args: Any) -> None:
    """Run one collective, polled: a blocking wait would end with the group's own timeout."""
    began = time.monotonic()
    marked, pause_s = False, _POLL_FIRST_S
    try:
        work = collective(*args, group=ranks.group, async_op=True)
        while not work.is_completed():
            waited_s = time.monotonic() - began
            if waited_s > ranks.timeout_s:
                raise _lost(ranks, f"not all came within {ranks.timeout_s:g} s")
            if not marked and waited_s > min(MARK_AFTER_S, ranks.timeout_s / 4):
                _mark(ranks)
                marked = True
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _POLL_MOST_S)
        work.wait()
    except RuntimeError as error:  # DistBackendError and gloo's errors are both
        if not marked:
            _mark(ranks)
        time.sleep(min(2 * MARK_AFTER_S, ranks.timeout_s))  # the others leave their marks, too
        raise _lost(ranks, f"the collective failed ({error})") from error
    if marked:
        _unmark(ranks)


def _lost(ranks: Ranks, why: str) -> RankLost:
    absent = _absent(ranks)
    named = f"ranks {absent[:_NAMED]}{' and more' if len(absent) > _NAMED else ''} are absent"
    if not absent:
        named = "none is known to be absent: look at the logs of all ranks"
    return RankLost(
        f"rank {ranks.rank} of {ranks.world_size} lost the others in the exchange that begins a "
        f"save or load, so nothing was committed or loaded: {why}; {named}"
    )


def _absent(ranks: Ranks) -> list[int]:
    """Ranks that wait nowhere, as far as the store knows."""
    try:
        store = default_store()
        others = (rank for rank in range(ranks.world_size) if rank != ranks.rank)
        return [rank for rank in others if not store.check([_key(ranks, rank)])]
    except (RuntimeError, ValueError) as error:  # its host may be the one that is lost
        logger.warning("the store that knows who is absent does not answer: %s", error)
        return []


def _mark(ranks: Ranks) -> None:
    try:
        default_store().set(_key(ranks, ranks.rank), "1")
    except (RuntimeError, ValueError) as error:
        logger.warning("could not tell in the store that this rank waits: %s", error)


def _unmark(ranks: Ranks) -> None:
    try:
        default_store().delete_key(_key(ranks, ranks.rank))
    except (RuntimeError, ValueError) as error:
        logger.warning("could not take back that this rank waits: %s", error)


def _key(ranks: Ranks, rank: int) -> str:
    assert ranks.group is not None
    return f"pt214_dcp/waits/{ranks.group.group_name}/{rank}"
