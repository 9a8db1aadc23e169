"""Resume from the newest step, and of equal ones from the nearest place that can give it.

memory -> peer -> disk -> store        a place that fails on any rank is left by all
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pt214_dcp.api import load
from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.errors import CheckpointError, NotACheckpoint
from pt214_dcp.exchange import exchange, members

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)
_MOST = 16  # candidates that are tried
_CANDIDATE = struct.Struct("<qq")


def restore_nearest(
    state_dict: dict[Any, Any],
    tiers: Sequence[Checkpointer],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[int, Checkpointer]:
    """Load the newest step that all ranks can load; collective.

    Args:
        state_dict: as for ``load``.
        tiers: nearest first, such as one over ``PeerMemory``, one on disk, one in a bucket.
        process_group: who loads; None is the default group.

    Returns:
        The step, and the tier that gave it.

    Raises:
        NotACheckpoint: no tier holds a checkpoint.
        CheckpointError: what the first one tried has answered, if none could be loaded.
    """
    ranks = members(process_group)
    found: list[tuple[int, int]] = []
    if ranks.rank == 0:
        found = _candidates(tiers)
    sent = b"".join(_CANDIDATE.pack(*pair) for pair in found)
    sent = sent.ljust(_MOST * _CANDIDATE.size, b"\xff")
    chosen = [pair for pair in _CANDIDATE.iter_unpack(exchange(ranks, sent)[0]) if pair[0] >= 0]
    first: CheckpointError | None = None
    for step, number in chosen:
        tier = tiers[number]
        try:
            load(state_dict, tier.path(step), process_group=process_group)
        except CheckpointError as error:  # on one rank for a reason of its own, then on all
            logger.warning("step %d can't be loaded from %s: %s", step, tier.folder, error)
            first = first or error
            continue
        return step, tier
    if first is not None:
        raise first
    raise NotACheckpoint(f"no checkpoint in any of {[str(tier.folder) for tier in tiers]}")


def _candidates(tiers: Sequence[Checkpointer]) -> list[tuple[int, int]]:
    """Steps and numbers of tiers, newest first, then nearest; of those that can be listed."""
    found = []
    for number, tier in enumerate(tiers):
        try:
            found += [(step, number) for step in tier.steps()]
        except (CheckpointError, OSError) as error:
            logger.warning("%s can't be listed: %s", tier.folder, error)
    return sorted(found, key=lambda pair: (-pair[0], pair[1]))[:_MOST]
