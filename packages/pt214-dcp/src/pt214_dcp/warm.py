"""Pay for the first save before training begins."""

from __future__ import annotations

from typing import Any

from pt214_dcp.agree import Agreement
from pt214_dcp.arena import ARENA, slot_bytes
from pt214_dcp.engine import writer_process
from pt214_dcp.exchange import Ranks
from pt214_dcp.incremental import Base
from pt214_dcp.options import SaveOptions
from pt214_dcp.rank_files import RankFiles
from pt214_dcp.structure import structure_of


def warm(state_dict: dict[Any, Any], ranks: Ranks, options: SaveOptions) -> None:
    """Plan, touch the staging memory, start the writer process; see ``api.prepare``."""
    structure = structure_of(state_dict, ranks.global_ranks)
    # The guess that all ranks are one key group costs a plan at most, if it is wrong.
    agreement = Agreement("", 0, tuple(range(ranks.world_size)))
    table = structure.table(agreement.members)
    plan = RankFiles.of(structure, table, agreement, ranks.rank, Base()).plan
    budget = options.budget_bytes
    windows = sum(1 for _ in plan.windows(slot_bytes(budget)))
    pinned = any(tensor.device.type == "cuda" for tensor in structure.tensors)
    ARENA.reserve(windows, budget, pinned=pinned)
    process = writer_process()
    for segment in ARENA.segments():
        process.segment(segment)
    process.ask({"op": "ready"})
