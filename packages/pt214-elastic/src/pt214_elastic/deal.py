"""Which samples a rank sees in a step: a pure function, so a lost rank's samples are dealt anew.

    position p = step * global_batch + slot        dataset of N samples, shuffled each N positions
    sample(p)  = shuffle(seed, p // N)[p % N]
    rank r of W gets slots [r * B // W, (r + 1) * B // W) of the B slots

Every rank makes the same number of passes, since collectives run in each. A pass's weight is its
share of the global batch, so that the sum over passes and ranks of weight * mean loss is the mean
over the global batch, for any W. A pass without samples of its own shows one with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass of one rank.

    Attributes:
        samples: dataset indices, at least one.
        weight: share of the global batch; 0 where the sample is only shown.
    """

    samples: tuple[int, ...]
    weight: float


@lru_cache(maxsize=4)  # a step touches at most two shuffles, unless the batch exceeds the dataset
def _shuffle(seed: int, round_: int, size: int) -> Sequence[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + round_)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def samples_of(
    step: int, size: int, global_batch: int, seed: int, shuffle: bool = True
) -> list[int]:
    """The dataset indices of one step's slots, in order."""
    first = step * global_batch
    if not shuffle:
        return [position % size for position in range(first, first + global_batch)]
    return [
        _shuffle(seed, position // size, size)[position % size]
        for position in range(first, first + global_batch)
    ]


def share(slots: int, parts: int, part: int) -> range:
    """The slots of one part; parts differ by at most one slot."""
    return range(part * slots // parts, (part + 1) * slots // parts)


def deal(
    samples: Sequence[int], world_size: int, rank: int, micro_batch: int | None = None
) -> list[Pass]:
    """The passes of ``rank``; as many for each rank of ``world_size``.

    Args:
        samples: the step's samples, :func:`samples_of`.
        world_size: ranks to deal to.
        rank: whose passes.
        micro_batch: most samples of one pass; ``None`` for all in one.
    """
    mine = [samples[slot] for slot in share(len(samples), world_size, rank)]
    largest = -(-len(samples) // world_size)
    passes = 1 if micro_batch is None else max(1, -(-largest // micro_batch))
    result = []
    for number in range(passes):
        own = tuple(mine[slot] for slot in share(len(mine), passes, number))
        result.append(Pass(own or (samples[0],), len(own) / len(samples)))
    return result


Deal = Callable[[Sequence[int], int, int, "int | None"], list[Pass]]
