"""Before anything is written: do all ranks save the same thing, and under which name?

One sum over all ranks of 13 numbers, whatever the model and however many ranks there are::

    how many failed | rank 0's uuid, 4 words | claims, 4 words | contents of replicas, 4 words

The first of the k ranks that must hold the same adds k - 1 times its digest, the others subtract
theirs: the sum is zero if all are equal. Only if ranks belong to several *key groups* (ranks with
the same label, which must hold the same structure) are 25 bytes of each rank gathered, and contents
summed again within groups. Only if a rank differs or failed are words gathered that name it. All
ranks see the same sums, so they raise together: none is left behind in a collective.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import uuid as uuids
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pt214_dcp import differ
from pt214_dcp.errors import RanksDiffer, SaveFailed
from pt214_dcp.exchange import Ranks, exchange, summed

_GROUP = struct.Struct("<B8s16s")  # task, label, structure
_WORDS = 4  # of 32 bits in a digest: a sum over ranks stays far below 63 bits
Words = list[int]


class Task(enum.IntEnum):
    """What a rank has come for; all must have come for the same."""

    SAVING = 1
    LOADING = 2


@dataclass(frozen=True, slots=True)
class Replica:
    """What one rank holds of a replica set.

    Attributes:
        digest: of its contents, 8 bytes.
        size: ranks in the set; 0 for all ranks of the key group.
        place: number of this rank in the set, if ``size`` is not 0.
    """

    digest: bytes
    size: int = 0
    place: int = 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank says of its state.

    Attributes:
        label: 8 bytes that name its key group.
        structure: 16 bytes that must be equal within the key group.
        replicas: name, 8 bytes, of each replica set that it is in -> what it holds there.
        describe: what the digests saw, by key, asked only if they differ; of one replica set, or,
            for None, of the structure.
    """

    label: bytes
    structure: bytes
    replicas: dict[bytes, Replica]
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


def agree(
    ranks: Ranks, claim: Claim | None, failure: BaseException | None, task: Task = Task.SAVING
) -> Agreement:
    """Compare claims; return what is agreed, or raise on all ranks.

    Args:
        ranks: who takes part.
        claim: what this rank holds; None if it failed before it knew.
        failure: what already went wrong here; this rank raises it, the others SaveFailed.
        task: what this rank has come for.

    Raises:
        RanksDiffer: digests differ; the message names ranks and keys.
        RankLost: a rank is absent or lost.
        SaveFailed: another rank failed.
    """
    everyone = tuple(range(ranks.world_size))
    uuid = _words(uuids.uuid4().bytes) if ranks.rank == 0 else [0] * _WORDS
    claims = contents = [0] * _WORDS
    if claim is not None:
        told = _words(_digest(bytes([task]), claim.label, claim.structure))
        claims = _weighed(told, len(everyone), ranks.rank)
        contents = _contents(claim, everyone, ranks.rank)
    try:
        failed, *sums = summed(ranks, [failure is not None, *uuid, *claims, *contents])
    except SaveFailed:
        if failure is not None:  # the first thing that went wrong here tells more
            raise failure from None
        raise
    if failed:
        _raise_failed(ranks, failure)
    assert claim is not None
    uuid, claims, contents = (sums[at : at + _WORDS] for at in (0, _WORDS, 2 * _WORDS))
    group, members = 0, everyone
    if any(claims):
        group, members = _grouped(ranks, claim, task)
        contents = summed(ranks, _contents(claim, members, ranks.rank))
    if any(contents):
        differ.raise_contents(ranks, claim)
    name = uuids.UUID(bytes=struct.pack(f"<{_WORDS}I", *uuid))
    return Agreement(name.hex, group, members)


def _contents(claim: Claim, members: tuple[int, ...], rank: int) -> Words:
    """This rank's part of a sum that is zero if all replica sets hold equal contents."""
    total = [0] * _WORDS
    for name, replica in claim.replicas.items():
        size, place = replica.size, replica.place
        if not size:
            size, place = len(members), members.index(rank)
        words = _words(_digest(name, replica.digest))  # with the name: sets must not cancel out
        total = [a + b for a, b in zip(total, _weighed(words, size, place), strict=True)]
    return total


def _weighed(words: Words, size: int, place: int) -> Words:
    """A part of a sum over ``size`` ranks that is zero if all have the same ``words``."""
    weight = size - 1 if place == 0 else -1
    return [weight * word for word in words]


def _words(data: bytes) -> Words:
    return list(struct.unpack(f"<{_WORDS}I", data))


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=4 * _WORDS).digest()


def _grouped(ranks: Ranks, claim: Claim, task: Task) -> tuple[int, tuple[int, ...]]:
    """Number and members of this rank's key group, once all groups are known to be sound."""
    rows = exchange(ranks, _GROUP.pack(task, claim.label, claim.structure))
    records = [_GROUP.unpack(data) for data in rows]
    tasks = [record[0] for record in records]
    if len(set(tasks)) > 1:
        other = {
            found.name.lower(): [r for r, t in enumerate(tasks) if t == found] for found in Task
        }
        raise RanksDiffer(f"ranks call different functions at the same time: {other}")
    labels: Sequence[bytes] = [record[1] for record in records]
    for label in dict.fromkeys(labels):
        inside = {rank: records[rank][2] for rank, name in enumerate(labels) if name == label}
        if len(set(inside.values())) > 1:
            differ.raise_differ(ranks, claim, None, inside)
    groups = list(dict.fromkeys(labels))
    members = tuple(rank for rank, label in enumerate(labels) if label == claim.label)
    return groups.index(claim.label), members


def _raise_failed(ranks: Ranks, failure: BaseException | None) -> None:
    """Raise this rank's own failure, or SaveFailed with the words of the ranks that failed."""
    text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    try:
        texts = differ.texts(ranks, text)
    except SaveFailed:
        texts = ["a rank failed, and others were lost before they could tell"]
    if failure is not None:
        raise failure
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
    raise SaveFailed(f"nothing was committed, since other ranks failed first: {told}")
