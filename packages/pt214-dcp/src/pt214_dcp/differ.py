"""Ranks differ, so all of them find out who differs from whom, and in which key.

Nothing here runs while all is well, so it may cost what it costs: what one rank holds is sent to
all, and each of them says where it differs.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from pt214_dcp.errors import RanksDiffer
from pt214_dcp.exchange import Ranks, broadcast, exchange

if TYPE_CHECKING:
    from pt214_dcp.agree import Claim

TEXT_BYTES = 512  # of one rank's explanation
_SET = struct.Struct("<8s8sI")  # name, digest of contents, ranks that must be in it
_COUNT = struct.Struct("<q")


def raise_contents(ranks: Ranks, claim: Claim) -> NoReturn:
    """Raise on all ranks for the first replica set whose ranks differ."""
    found: dict[bytes, dict[int, bytes]] = {}
    sizes: dict[bytes, int] = {}
    for rank, name, digest, size in _gathered(ranks, claim):
        found.setdefault(name, {})[rank] = digest
        sizes[name] = size
    for name, inside in found.items():
        if len(set(inside.values())) > 1:
            raise_differ(ranks, claim, name, inside)
    for name, inside in found.items():
        if sizes[name] and len(inside) != sizes[name]:
            raise RanksDiffer(
                f"ranks {sorted(inside)} hold DTensors that {sizes[name]} ranks of their mesh must "
                "hold, but the others of that mesh save none of them, so nothing was committed; "
                "ranks of one mesh must be in one key_group"
            )
    raise RanksDiffer(
        "ranks hold unequal state, so nothing was committed; it was changed while they compared "
        "it: no other thread may write to the tensors while a save begins"
    )


def _gathered(ranks: Ranks, claim: Claim) -> Iterator[tuple[int, bytes, bytes, int]]:
    """Rank, replica set, its digest there and size of the set, of all ranks."""
    mine = sorted(claim.replicas.items())
    counts = exchange(ranks, _COUNT.pack(len(mine)))
    most = max(_COUNT.unpack(data)[0] for data in counts)
    packed = b"".join(_SET.pack(name, held.digest, held.size) for name, held in mine)
    for rank, data in enumerate(exchange(ranks, packed.ljust(most * _SET.size, b"\0"))):
        for name, digest, size in _SET.iter_unpack(data):
            if name.strip(b"\0"):
                yield rank, name, digest, size


def raise_differ(
    ranks: Ranks, claim: Claim, name: bytes | None, digests: dict[int, bytes]
) -> NoReturn:
    """Find the ranks that differ from the most common digest, and the first key where they do."""
    most = Counter(digests.values()).most_common(1)[0][0]
    model = next(rank for rank, found in digests.items() if found == most)
    differing = [rank for rank, found in digests.items() if found != most]
    mine = claim.describe(name) if ranks.rank in digests else {}
    flat = "\0".join(text for pair in mine.items() for text in pair).encode()
    words = broadcast(ranks, flat, model).decode().split("\0")
    theirs = dict(zip(words[::2], words[1::2], strict=False))
    told = texts(ranks, _first_difference(mine, theirs) if ranks.rank in digests else "")
    named = "; ".join(f"rank {rank}: {told[rank]}" for rank in differing)
    raise RanksDiffer(
        f"ranks hold unequal state, so nothing was committed (compared with rank {model}): {named}."
        " Plain tensors and values must be equal on all ranks; use DTensor for what is sharded, "
        "PerRank for what each rank has for itself, key_group= for ranks with other keys"
    )


def _first_difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    for key in sorted(mine.keys() | theirs.keys()):
        if mine.get(key) != theirs.get(key):
            here, there = mine.get(key, "nothing"), theirs.get(key, "nothing")
            return f"{key} is {here} here, {there} there"
    return "equal"


def texts(ranks: Ranks, text: str) -> list[str]:
    """``text`` of every rank, cut to ``TEXT_BYTES``."""
    padded = text.encode("utf-8", "replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return [data.rstrip(b"\0").decode("utf-8", "ignore") for data in exchange(ranks, padded)]
