"""Before anything is written: do all ranks save the same thing, and under which name?

One exchange of records of fixed size, plus one more for each four replica sets beyond the first
four; nothing grows with the model::

    failed? | uuid | key group | digest of structure | (replica set, digest of contents) x 4

Rank 0's uuid names the save. Ranks with the same label are a *key group* and must hold the same
structure; ranks in the same replica set must hold the same bits. If a rank failed, or digests
differ, all ranks see it in this same exchange, and a second one (of fixed size, too) carries what
to tell the user. So no rank is left behind in a collective, and none goes on alone.
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
_RECORD = struct.Struct("<BH16s8s16s")
_SET = struct.Struct("<8s8s")
_SETS = 4  # of replica sets in one exchange: few models have more
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
class Claim:
    """What one rank says of its state.

    Attributes:
        label: 8 bytes that name its key group.
        structure: 16 bytes that must be equal within the key group.
        replicas: name of each replica set that it is in -> digest of its contents; 8 bytes each.
        describe: what the digests saw, by key, asked only if they differ; of one replica set, or,
            for None, of the structure.
    """

    label: bytes
    structure: bytes
    replicas: dict[bytes, bytes]
    describe: Callable[[bytes | None], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know after the exchange.

    Attributes:
        uuid: of the save.
        group: number of this rank's key group; groups are counted by their lowest rank.
        members: ranks of this rank's key group.
    """

    uuid: str
    group: int
    members: tuple[int, ...]


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


def agree(ranks: Ranks, claim: Claim | None, failure: BaseException | None) -> Agreement:
    """Compare claims; return what is agreed, or raise on all ranks.

    Args:
        ranks: who takes part.
        claim: what this rank holds; None if it failed before it knew.
        failure: what already went wrong here; this rank raises it, the others SaveFailed.

    Raises:
        RanksDiffer: digests differ; the message names ranks and keys.
        SaveFailed: another rank failed, or is lost.
    """
    flag = _OK if failure is None else _FAILED
    sets = sorted(claim.replicas.items()) if claim else []
    head = (claim.label, claim.structure) if claim else (b"", b"")
    mine = _RECORD.pack(flag, len(sets), uuids.uuid4().bytes, *head) + _pack_sets(sets[:_SETS])
    try:
        answers = exchange(ranks, mine)
    except SaveFailed:
        if failure is not None:  # the first thing that went wrong here tells more
            raise failure from None
        raise
    records = [_RECORD.unpack(data[: _RECORD.size]) for data in answers]
    failed = [rank for rank, record in enumerate(records) if record[0] == _FAILED]
    if failed:
        _raise_failed(ranks, failed, failure)
    assert claim is not None
    found = [data[_RECORD.size :] for data in answers]
    for at in range(_SETS, max(record[1] for record in records), _SETS):
        more = exchange(ranks, _pack_sets(sets[at : at + _SETS]))
        found = [have + new for have, new in zip(found, more, strict=True)]
    labels = [record[3] for record in records]
    _compare(ranks, claim, labels, [record[4] for record in records], found)
    groups = list(dict.fromkeys(labels))
    members = tuple(rank for rank, label in enumerate(labels) if label == claim.label)
    return Agreement(uuids.UUID(bytes=records[0][2]).hex, groups.index(claim.label), members)


def _pack_sets(sets: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(_SET.pack(*pair) for pair in sets).ljust(_SETS * _SET.size, b"\0")


def _compare(
    ranks: Ranks,
    claim: Claim,
    labels: Sequence[bytes],
    structures: Sequence[bytes],
    found: Sequence[bytes],
) -> None:
    """Raise on all ranks for the first group or replica set whose ranks differ."""
    for label in dict.fromkeys(labels):
        inside = {rank: structures[rank] for rank, name in enumerate(labels) if name == label}
        if len(set(inside.values())) > 1:
            _raise_differ(ranks, claim, None, inside)
    contents: dict[bytes, dict[int, bytes]] = {}
    for rank, data in enumerate(found):
        for name, digest in _SET.iter_unpack(data):
            if name.strip(b"\0"):
                contents.setdefault(name, {})[rank] = digest
    for name, inside in contents.items():
        if len(set(inside.values())) > 1:
            _raise_differ(ranks, claim, name, inside)


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


def _raise_differ(
    ranks: Ranks, claim: Claim, name: bytes | None, digests: dict[int, bytes]
) -> None:
    """Find the ranks that differ from the most common digest, and the first key where they do."""
    most = Counter(digests.values()).most_common(1)[0][0]
    model = next(rank for rank, found in digests.items() if found == most)
    differing = [rank for rank, found in digests.items() if found != most]
    mine = claim.describe(name) if ranks.rank in digests else {}
    theirs = _broadcast_lines(ranks, mine, model)
    texts = _texts(ranks, _first_difference(mine, theirs) if ranks.rank in digests else "")
    told = "; ".join(f"rank {rank}: {texts[rank]}" for rank in differing)
    raise RanksDiffer(
        f"ranks hold unequal state, so nothing was committed (compared with rank {model}): {told}. "
        "Plain tensors and values must be equal on all ranks; use DTensor for what is sharded, "
        "PerRank for what each rank has for itself, key_group= for ranks with other keys"
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
