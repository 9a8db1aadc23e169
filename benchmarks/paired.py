"""Ratios of candidates that took turns, and how sure their median is.

A round runs every candidate once, so a slow spell of the machine meets them all, and only ratios
within a round are compared. The interval is the sign test's, turned round: of n sorted ratios the
k-th from below and the k-th from above, k as large as coverage allows::

    P(k-th lowest <= median <= k-th highest) = 1 - 2 * P(Binomial(n, 1/2) < k)

It asks nothing of the ratios but that rounds are independent. Under five rounds none covers 90 %.
Source: Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

COVERAGE = 0.9


@dataclass(frozen=True, slots=True)
class Paired:
    """Ratios of one rival, a round each, over ours.

    Attributes:
        ratios: rival over ours, in the rounds' order; above 1 we are better if less is better.
        median: of the ratios.
        low: lower end of the interval.
        high: its upper end.
        coverage: chance that such an interval holds the true median; below 0.9 if rounds are few.
    """

    ratios: tuple[float, ...]
    median: float
    low: float
    high: float
    coverage: float


def paired(ours: Sequence[float], rival: Sequence[float]) -> Paired:
    """Compare two candidates that took the same rounds.

    Raises:
        ValueError: no rounds, other numbers of rounds, or a figure that is not above 0: whoever
            took no time has done nothing.
    """
    if not ours or len(ours) != len(rival):
        raise ValueError(
            f"ours has {len(ours)} rounds, the rival {len(rival)}: want equal, above 0"
        )
    wrong = [figure for figure in (*ours, *rival) if not 0 < figure < math.inf]
    if wrong:
        raise ValueError(f"figures must be above 0 and finite, got {wrong}")
    ratios = tuple(b / a for a, b in zip(ours, rival, strict=True))
    at, coverage = rank_of(len(ratios))
    ordered = sorted(ratios)
    return Paired(ratios, statistics.median(ratios), ordered[at - 1], ordered[-at], coverage)


def rank_of(rounds: int) -> tuple[int, float]:
    """``k`` of the interval from that many rounds, and what it covers.

    >>> rank_of(5), rank_of(15)
    ((1, 0.9375), (4, 0.96484375))
    """
    best = (1, _coverage(rounds, 1))
    for at in range(2, rounds // 2 + 1):
        if _coverage(rounds, at) < COVERAGE:
            break
        best = (at, _coverage(rounds, at))
    return best


def _coverage(rounds: int, at: int) -> float:
    below: int = sum(math.comb(rounds, count) for count in range(at))
    return float(max(0.0, 1 - 2 * below / 2**rounds))
