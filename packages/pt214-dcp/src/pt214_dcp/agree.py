"""In the foreground: one exchange of fixed size says that all ranks are here and hold the same.

    each rank: flag | uuid | digest of structure | digest of replicas      -> all ranks

Rank 0's uuid names the save. If a rank failed, or digests differ, all ranks see it in this same
exchange, and a second one (of fixed size, too) carries what to tell the user. So no rank is left
behind in a collective, and none goes on alone.
"""

from __future__ import annotations

import struct
import uuid as uuids
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pt214_dcp.compat import exchange_device
from pt214_dcp.errors import CheckpointError, RanksDiffer, SaveFailed

TEXT_BYTES = 512  # of one rank's explanation
_RECORD = struct.Struct("<B16s16s16s")
_OK, _FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who takes part: this rank's number in the group, and the global rank of each."""

    rank: int
    global_ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def world_size(self) -> int:
        """Ranks in the group; 1 without one."""
        return len(self.global_ranks)


@dataclass(frozen=True, slots=True)
class Belief:
    """What must be equal on all ranks: 16 bytes of structure, 16 bytes of replicated contents."""

    structure: bytes
    content: bytes
    describe: Callable[[], dict[str, str]]  # key -> what the digests saw, asked only if they differ


def members(process_group: dist.ProcessGroup | None, *, alone: bool = False) -> Ranks:
    """The ranks of ``process_group``, of the default group, or this process alone.

    Raises:
        ValueError: this rank is not in the group.
    """
    if alone or not (dist.is_available() and dist.is_initialized()):
        return Ranks(0, (0,), None)
    group = process_group or dist.distributed_c10d._get_default_group()
    if dist.get_rank(group) < 0:
        raise ValueError("process_group does not hold this rank; call on its members only")
    return Ranks(dist.get_rank(group), tuple(dist.get_process_group_ranks(group)), group)


def exchange(ranks: Ranks, mine: bytes) -> list[bytes]:
    """``mine`` of every rank, in their order; all must be equally long.

    Raises:
        SaveFailed: a rank is lost; its cause is the collective's own error.
    """
    if ranks.group is None or ranks.world_size == 1:
        return [mine]
    device = exchange_device(ranks.group)
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in ranks.global_ranks]
    try:
        dist.all_gather(received, sent, group=ranks.group)
        return [bytes(tensor.tolist()) for tensor in received]
    except RuntimeError as error:  # DistBackendError and gloo's errors are both
        raise SaveFailed(
            f"rank {ranks.rank} of {ranks.world_size} lost the others in the exchange that begins "
            f"a save or load; nothing was committed: {error}"
        ) from error


def agree(ranks: Ranks, belief: Belief | None, failure: BaseException | None) -> str:
    """Return the uuid of the save, equal on all ranks, or raise on all ranks.

    Args:
        ranks: who takes part.
        belief: what this rank holds; None if it failed before it knew.
        failure: what already went wrong here; this rank raises it, the others SaveFailed.

    Raises:
        RanksDiffer: digests differ; the message names ranks and keys.
        SaveFailed: another rank failed, or is lost.
    """
    flag = _OK if failure is None else _FAILED
    structure, content = (belief.structure, belief.content) if belief else (b"", b"")
    mine = _RECORD.pack(flag, uuids.uuid4().bytes, structure, content)
    try:
        records = [_RECORD.unpack(data) for data in exchange(ranks, mine)]
    except SaveFailed:
        if failure is not None:  # the first thing that went wrong here tells more
            raise failure from None
        raise
    failed = [rank for rank, record in enumerate(records) if record[0] == _FAILED]
    if failed:
        _raise_failed(ranks, failed, failure)
    assert belief is not None
    if len({record[2:] for record in records}) > 1:
        _raise_differ(ranks, belief, [record[2:] for record in records])
    return uuids.UUID(bytes=records[0][1]).hex


def _raise_failed(ranks: Ranks, failed: Sequence[int], failure: BaseException | None) -> None:
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        texts = _texts(ranks, text)
    except SaveFailed:
        texts = [""] * ranks.world_size
    if failure is not None:
        raise failure
    told = "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
    raise SaveFailed(f"nothing was committed, since other ranks failed first: {told}")


def _raise_differ(ranks: Ranks, belief: Belief, digests: Sequence[object]) -> None:
    """Find the ranks that differ from the most common digest, and the first key where they do."""
    most = Counter(digests).most_common(1)[0][0]
    model = digests.index(most)  # a rank that holds what most hold
    differing = [rank for rank, found in enumerate(digests) if found != most]
    mine = belief.describe()
    theirs = _broadcast_lines(ranks, mine, model)
    texts = _texts(ranks, _first_difference(mine, theirs))
    told = "; ".join(f"rank {rank}: {texts[rank]}" for rank in differing)
    raise RanksDiffer(
        f"ranks hold unequal state, so nothing was committed (compared with rank {model}): {told}. "
        "Plain tensors and values must be equal on all ranks; use DTensor for sharded ones"
    )


def _first_difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            here, there = mine.get(key, "nothing"), theirs.get(key, "nothing")
            return f"{key} is {here} here, {there} there"
    return "equal"


def _broadcast_lines(ranks: Ranks, mine: dict[str, str], source: int) -> dict[str, str]:
    """``mine`` of rank ``source``: its length first, then the text."""
    flat = "\0".join(text for pair in mine.items() for text in pair).encode()
    length = struct.unpack("<q", exchange(ranks, struct.pack("<q", len(flat)))[source])[0]
    if ranks.group is None:
        raise CheckpointError("a rank alone can't differ from itself")
    device = exchange_device(ranks.group)
    data = torch.zeros(length, dtype=torch.uint8, device=device)
    if ranks.rank == source:
        data.copy_(torch.frombuffer(bytearray(flat), dtype=torch.uint8))
    dist.broadcast(data, ranks.global_ranks[source], group=ranks.group)
    words = bytes(data.tolist()).decode().split("\0")
    return dict(zip(words[::2], words[1::2], strict=True))


def _texts(ranks: Ranks, text: str) -> list[str]:
    padded = text.encode("utf-8", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return [data.rstrip(b"\0").decode("utf-8", "ignore") for data in exchange(ranks, padded)]
