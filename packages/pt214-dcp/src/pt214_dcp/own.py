"""Fill what stands in ``PerRank``: from this rank's own manifest, or as ``resize`` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pt214_dcp import state, trees
from pt214_dcp.checkpoint import Checkpoint
from pt214_dcp.errors import StateMismatch
from pt214_dcp.exchange import Ranks
from pt214_dcp.fit import Fit, compare
from pt214_dcp.layout import whole_box
from pt214_dcp.manifest import Manifest
from pt214_dcp.per_rank import PerRank, Resize
from pt214_dcp.reads import Reads
from pt214_dcp.staging import bits
from pt214_dcp.state import Flat
from pt214_dcp.trees import Json


@dataclass(frozen=True, slots=True)
class OwnFill:
    """A marker and the tree whose values go into it."""

    marker: PerRank
    tree: Json


def own_fills(
    checkpoint: Checkpoint, flat: Flat, found: Fit, reads: Reads, ranks: Ranks
) -> list[OwnFill]:
    """Plan the reads of every ``PerRank``; return those whose values are to be replaced.

    Raises:
        StateMismatch: shapes differ, or the number of ranks does and ``resize`` is "error".
    """
    fills: list[OwnFill] = []
    different: list[str] = []
    for own in flat.own:
        group = found.home.get(own.key)
        if group is None:
            continue
        source = _source(checkpoint, group, ranks, own.marker.resize)
        if source is None:
            if own.marker.resize is Resize.ERROR:
                saved, now = checkpoint.commit.world_size, ranks.world_size
                different.append(
                    f"{own.key}: each of {saved} ranks saved its own, {now} ranks load; choose "
                    'PerRank(..., resize="keep") or "wrap"'
                )
            continue
        number = checkpoint.table(group).per_rank[own.key]
        manifest = checkpoint.manifest(source)
        tree = manifest.own[number].tree
        if trees.kinds(tree, own.key) != trees.kinds(own.tree, own.key):
            different.append(f"{own.key}: rank {source} saved other keys or kinds in its PerRank")
            continue
        first = sum(item.tensors for item in manifest.own[:number])
        inner = Fit()
        for at, leaf in enumerate(own.leaves):
            compare(inner, leaf, manifest.own_tensors[first + at], cast=False)
        different += inner.different
        if not inner.different:
            base = len(checkpoint.table(group).tensors) + first
            _plan(manifest, base, own.leaves, reads)
            fills.append(OwnFill(own.marker, tree))
    if different:
        raise StateMismatch(str(checkpoint.path), (), (), different)
    return fills


def _source(checkpoint: Checkpoint, group: int, ranks: Ranks, resize: Resize) -> int | None:
    """The rank whose own values this rank gets, or None."""
    saved = checkpoint.commit.world_size
    if saved == ranks.world_size and checkpoint.record(ranks.rank).group == group:
        return ranks.rank
    if resize is not Resize.WRAP:
        return None
    rank = ranks.rank % saved
    return next(
        (r for r in (*range(rank, saved), *range(rank)) if checkpoint.record(r).group == group),
        None,
    )


def _plan(manifest: Manifest, base: int, leaves: Sequence[state.Leaf], reads: Reads) -> None:
    chunks = {chunk.tensor: chunk for chunk in manifest.chunks if chunk.tensor >= base}
    for at, leaf in enumerate(leaves):
        chunk = chunks.get(base + at)
        if chunk is not None:  # an empty tensor has none
            into = bits(leaf.tensor.detach())
            reads.add(manifest, chunk, whole_box(tuple(into.shape)), into, into.dtype)
