"""When an affine chain's coefficients are worth a buffer of their own.

A chain ``y = ((x - a) * b * c) + d`` with per-channel coefficients reads up to four of them for
each element of ``x``, and inductor inlines what computes them (for BatchNorm a square root and a
division) into the same loop. Hoisting pays

    work removed from each element * elements  >  one more kernel over the coefficients

The thresholds below are ratios, not times: no machine constant is needed while the big loop has
many elements for each coefficient.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# H200, bf16, torch 2.11, BatchNorm + GELU as CUDA graphs: 524,288 elements 5.0 -> 5.7 us (a loss),
# 2,986,368 elements 16.3 -> 14.3 us, 33,554,432 elements in channels_last 81.7 -> 59.9 us.
MIN_ELEMENTS = 1 << 20
MIN_ELEMENTS_CPU = 1 << 12  # a CPU pays a function call inside the same process: not tuned yet
MIN_REUSE = 64  # elements for each coefficient; not tuned yet


class Verdict(Enum):
    """Why a chain is hoisted or left alone; the text is what ``explain`` prints."""

    HOIST = "hoisted: coefficients computed once"
    NOTHING_SAVED = "left: one coefficient and nothing computed from it in the loop"
    TOO_SMALL = "left: too few elements to hide one more launch"
    LOW_REUSE = "left: too few elements for each coefficient"


@dataclass(frozen=True, slots=True)
class Chain:
    """What the decision needs to know about one affine chain."""

    elements: int  # of the big tensor; a symbolic size counts with its hint
    coefficients: int  # of one coefficient tensor
    steps: int  # affine steps in the chain
    inlined_ops: int  # arithmetic nodes over the coefficients that inductor would inline
    device: str  # torch.device.type


def decide(chain: Chain) -> Verdict:
    """Tell whether to hoist.

    >>> decide(Chain(elements=2**25, coefficients=128, steps=4, inlined_ops=3, device="cuda"))
    <Verdict.HOIST: 'hoisted: coefficients computed once'>
    """
    if chain.steps < 2 or (chain.steps == 2 and chain.inlined_ops == 0):
        return Verdict.NOTHING_SAVED
    if chain.elements < (MIN_ELEMENTS_CPU if chain.device == "cpu" else MIN_ELEMENTS):
        return Verdict.TOO_SMALL
    if chain.elements < MIN_REUSE * chain.coefficients:
        return Verdict.LOW_REUSE
    return Verdict.HOIST
