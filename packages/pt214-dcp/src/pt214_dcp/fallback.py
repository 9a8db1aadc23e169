"""When the newest checkpoint turns out damaged: may all ranks go back to an older one?

    what each rank met:  damage | another rank's failure | anything else      -> one byte each

All ranks go back if at least one met damage and none met anything else: a state dict that does not
fit would not fit the older one either, and whoever raises alone leaves the others in a collective.
"""

from __future__ import annotations

import enum
import errno

from pt214_dcp.errors import ChunkCorrupt, LoadFailed, NotACheckpoint, RankLost
from pt214_dcp.exchange import Ranks, exchange


class Met(enum.IntEnum):
    """Why a load failed on this rank."""

    DAMAGE = 0
    ANOTHER_RANKS = 1
    OTHER = 2


def met(error: BaseException) -> Met:
    """What ``error`` of a load says."""
    if isinstance(error, ChunkCorrupt | NotACheckpoint):
        return Met.DAMAGE
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return Met.DAMAGE  # the disk itself says that it lost these bytes
    return Met.ANOTHER_RANKS if isinstance(error, LoadFailed) else Met.OTHER


def all_may_go_back(ranks: Ranks, error: BaseException) -> bool:
    """Whether to try an older checkpoint; collective, equal on all ranks that are left."""
    try:
        answers = exchange(ranks, bytes([met(error)]))
    except RankLost:  # a rank is lost; the load's own error tells more
        return False
    found = {Met(answer[0]) for answer in answers}
    return Met.DAMAGE in found and Met.OTHER not in found
