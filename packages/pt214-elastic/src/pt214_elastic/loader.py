"""A map-style dataset, dealt by step: what ``step.batches`` iterates over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from pt214_elastic import deal
from pt214_elastic.errors import LoopError


@dataclass(frozen=True)
class Loader:
    """Samples of each step, for any number of ranks; makes no copy and holds no position.

    Attributes:
        dataset: has ``__len__`` and ``__getitem__``.
        global_batch: samples of one step over all ranks.
        seed: of the shuffles.
        shuffle: ``False`` for the dataset's own order.
        micro_batch: most samples of one pass on one rank.
        collate_fn: makes a batch of samples, as for ``torch.utils.data.DataLoader``.
    """

    dataset: Any
    global_batch: int
    seed: int = 0
    shuffle: bool = True
    micro_batch: int | None = None
    collate_fn: Callable[[list[Any]], Any] = default_collate

    def __post_init__(self) -> None:
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise LoopError(
                f"loader of a {type(self.dataset).__name__}: expected a map-style dataset with"
                " __len__ and __getitem__; an iterable one can't give the same samples twice"
            )
        if len(self.dataset) == 0:
            raise LoopError("loader: the dataset is empty")
        if self.global_batch < 1 or (self.micro_batch is not None and self.micro_batch < 1):
            raise LoopError(
                f"loader: global_batch={self.global_batch}, micro_batch={self.micro_batch}:"
                " expected at least 1"
            )

    def passes(self, step: int, world_size: int, rank: int) -> list[deal.Pass]:
        """What ``rank`` of ``world_size`` does in ``step``."""
        samples = deal.samples_of(
            step, len(self.dataset), self.global_batch, self.seed, self.shuffle
        )
        return deal.deal(samples, world_size, rank, self.micro_batch)

    def batch(self, item: deal.Pass) -> tuple[Any, ...]:
        """The collated batch of one pass, its weight last."""
        batch = self.collate_fn([self.dataset[index] for index in item.samples])
        parts = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
        return (*parts, item.weight)
