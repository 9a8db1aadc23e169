"""Inductor's heuristics with the ones that we measured otherwise.

Stock keeps a row in registers up to 1,024 elements and reads longer rows twice. One pass over the
row moves fewer bytes as long as the row fits the registers of one program.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V

# H200, bf16, torch 2.11, softmax: 32768x4096 310 -> 142 us, 8192x8192 157 -> 68 us.
MAX_PERSISTENT_ROW = 8192  # elements


class Choices(InductorChoices):
    """Stock's choices, with longer rows held in registers."""

    @staticmethod
    def should_use_persistent_reduction(features: Any, cooperative_reduction: bool) -> bool:
        """Stock's answer, and yes for static inner rows up to ``MAX_PERSISTENT_ROW``."""
        if InductorChoices.should_use_persistent_reduction(features, cooperative_reduction):
            return True
        if cooperative_reduction or not config.triton.persistent_reductions:
            return False
        strict = getattr(features, "strict_sum_rblock", None)
        if strict is not None and strict() is not None:
            return False
        if features.get_reduction_hint() != ReductionHint.INNER:
            return False
        return bool(
            V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_PERSISTENT_ROW)
        )

    def uuid(self) -> str:
        """Name of this set of choices in inductor's cache key."""
        return f"pt214-persistent-{MAX_PERSISTENT_ROW}"
