"""The foreground of a save or load: absent ranks are named in time, failures reach all ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from pt214_dcp import agree, exchange, saver
from pt214_dcp.errors import LoadFailed, RankLost, RanksDiffer, SaveFailed
from pt214_dcp.rank_files import RankFiles

WAIT_S = 2.0


def state(number: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((300,), number), "step": 3}


def gathered_rank(rank: int, size: int) -> None:
    ranks = exchange.members(None)
    assert exchange.exchange(ranks, bytes([rank, 7])) == [bytes([at, 7]) for at in range(size)]
    assert exchange.summed(ranks, [rank, -(1 << 40)]) == [sum(range(size)), -size << 40]
    for source in range(size):
        assert exchange.broadcast(ranks, b"x" * rank, source) == b"x" * source
    store = dist.distributed_c10d._get_default_store()
    assert store.num_keys() >= 0
    assert not store.check([exchange._key(ranks, rank)])  # nothing is left where all come in time


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_hears_the_same(run_ranks: Callable[..., None], size: int) -> None:
    run_ranks(size, gathered_rank, size)


def absent_rank(rank: int, folder: str, call: str) -> None:
    """Rank 1 never comes; ranks 0 and 2 say so, by name, and keep what they had."""
    path = Path(folder)
    pt214_dcp.save(state(1.0), path / "c")
    blank = state(0.0)
    if rank == 1:
        time.sleep(3 * WAIT_S)
        return
    began = time.monotonic()
    function: Any = getattr(pt214_dcp, call)
    with pytest.raises(RankLost, match=r"ranks \[1\] are absent") as caught:
        function(state(2.0) if call == "save" else blank, path / "c", timeout_s=WAIT_S)
    assert time.monotonic() - began >= WAIT_S
    assert isinstance(caught.value, SaveFailed)
    assert isinstance(caught.value, LoadFailed)
    assert not blank["w"].any()
    time.sleep(WAIT_S)  # until both have given up: marks are for those who still wait
    kept = state(0.0)
    pt214_dcp.load(kept, path / "c", alone=True)
    assert torch.equal(kept["w"], state(1.0)["w"])


@pytest.mark.parametrize("call", ["save", "load"])
def test_a_rank_that_never_comes_is_named(
    run_ranks: Callable[..., None], tmp_path: Path, call: str
) -> None:
    run_ranks(3, absent_rank, str(tmp_path), call)


def unmarked_rank(rank: int, folder: str) -> None:
    broken: Any = exchange
    broken._mark = lambda _: None
    absent_rank(rank, folder, "save")


def test_without_marks_the_absent_rank_is_not_named(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1, 2\] are absent"):
        run_ranks(3, unmarked_rank, str(tmp_path))


def killed_rank(rank: int, folder: str) -> None:
    if rank == 1:
        time.sleep(60)
    with pytest.raises(RankLost, match=r"ranks \[1\] are absent"):
        pt214_dcp.save(state(), Path(folder) / "c", timeout_s=30)
    Path(folder, f"told-{rank}").touch()


def test_a_rank_that_is_killed_is_named_before_the_timeout(
    begin_ranks: Callable[..., list[BaseProcess]], tmp_path: Path
) -> None:
    processes = begin_ranks(3, killed_rank, str(tmp_path))
    time.sleep(2)
    processes[1].kill()
    until = time.monotonic() + 20
    while len(list(tmp_path.glob("told-*"))) < 2:
        assert time.monotonic() < until, list(tmp_path.glob("*.error.*"))
        time.sleep(0.05)


def late_rank(rank: int, folder: str) -> None:
    """Late, but in time: the mark is taken back, so that nobody is taken for waiting later."""
    time.sleep(1.5 if rank == 1 else 0)
    pt214_dcp.save(state(), Path(folder) / "c", timeout_s=60)
    dist.barrier()
    ranks = exchange.members(None)
    assert exchange._absent(ranks) == [at for at in range(2) if at != rank]


def test_a_late_rank_is_waited_for(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(2, late_rank, str(tmp_path))


def failing_rank(rank: int, folder: str, broken: str) -> None:
    """Rank 1 fails after the agreement: in its plan, or as its thread starts."""
    path = Path(folder) / "c"
    pt214_dcp.save(state(1.0), path)
    target: Any = RankFiles if broken == "plan" else threading.Thread
    refuse = mock.Mock(side_effect=RuntimeError("no more of this"))
    attack = mock.patch.object(target, "of" if broken == "plan" else "start", refuse)
    began = time.monotonic()
    with attack if rank == 1 else nullcontext(), \
         pytest.raises(SaveFailed, match="RuntimeError: no more of this"):  # fmt: skip
        pt214_dcp.save(state(2.0), path, timeout_s=60)
    assert time.monotonic() - began < 30  # told, not timed out
    kept = state(0.0)
    pt214_dcp.load(kept, path, alone=True)
    assert torch.equal(kept["w"], state(1.0)["w"])


@pytest.mark.parametrize("broken", ["plan", "thread"])
def test_a_failure_after_the_agreement_reaches_all(
    run_ranks: Callable[..., None], tmp_path: Path, broken: str
) -> None:
    run_ranks(3, failing_rank, str(tmp_path), broken)


def silent_rank(rank: int, folder: str) -> None:
    broken: Any = saver
    broken._tell = lambda *_: None
    short, api = pt214_dcp.save, cast(Any, pt214_dcp)
    api.save = lambda *args, **more: short(*args, **(more | {"timeout_s": 3}))
    failing_rank(rank, folder, "plan")


def test_ranks_that_are_not_told_do_not_pass(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match=r"no word in time from ranks \[1\]"):
        run_ranks(3, silent_rank, str(tmp_path))


def mixed_rank(rank: int, folder: str) -> None:
    path = Path(folder) / "c"
    pt214_dcp.save(state(1.0), path)
    with pytest.raises((RanksDiffer, LoadFailed), match="different functions at the same time"):
        pt214_dcp.load(state(), path) if rank else pt214_dcp.save(state(), path)


def test_a_save_never_meets_a_load(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(2, mixed_rank, str(tmp_path))


def claim(label: bytes, structure: bytes, sets: dict[bytes, agree.Replica]) -> agree.Claim:
    return agree.Claim(label, structure, sets, lambda name: {"key": f"{sets} for {name!r}"})


def agreement_rank(rank: int, broken: bool) -> None:
    """Four ranks; key groups by parity; a set of plain tensors each, one of all four ranks."""
    if broken:
        module: Any = agree
        module.summed = lambda _, numbers: [0, *numbers[1:5], *[0] * (len(numbers) - 5)]
    ranks = exchange.members(None)

    def mine(odd: bytes, other: bytes, whole: bytes) -> agree.Claim:
        label = b"label  %d" % (rank % 2)
        return claim(label, bytes(16), {
            label: agree.Replica(odd.ljust(8)),
            b"everyone": agree.Replica(whole.ljust(8), 4, rank),
            b"pair": agree.Replica(other.ljust(8), 2, rank // 2),
        } if rank % 2 else {
            label: agree.Replica(b"even    "), b"everyone": agree.Replica(whole.ljust(8), 4, rank),
        })  # fmt: skip

    found = agree.agree(ranks, mine(b"odd", b"pair", b"all"), None)
    assert found.group == rank % 2
    assert found.members == (rank % 2, rank % 2 + 2)
    third = rank == 3
    cases = [(b"bad" if third else b"odd", b"pair", b"all"),
             (b"odd", b"bad" if third else b"pair", b"all"),
             (b"odd", b"pair", b"bad" if third else b"all"),
             (b"a" if third else b"b", b"b" if third else b"a", b"all")]  # fmt: skip
    for case in cases:  # the last one holds the same two contents, the other way round
        with pytest.raises(RanksDiffer, match=r"rank [13]: key is"):
            agree.agree(ranks, mine(*case), None)
    with pytest.raises(RanksDiffer, match="one key_group"):
        agree.agree(ranks, claim(b"l" * 8, bytes(16), {b"s" * 8: agree.Replica(b"c" * 8, 4, rank)}
                                 if rank else {}), None)  # fmt: skip


def test_equal_claims_pass_and_each_kind_of_difference_is_named(
    run_ranks: Callable[..., None],
) -> None:
    run_ranks(4, agreement_rank, False)


def test_an_agreement_that_asks_nobody_is_caught(run_ranks: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        run_ranks(4, agreement_rank, True)
