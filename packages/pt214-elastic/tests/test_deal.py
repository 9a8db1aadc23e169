"""Dealing: every sample once, the same number of passes, weights of the global batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pt214_elastic import deal

BATCH = st.integers(1, 40)
WORLD = st.integers(1, 7)
MICRO = st.one_of(st.none(), st.integers(1, 9))


@given(BATCH, WORLD, MICRO)
def test_each_sample_counts_once_and_passes_are_as_many_on_each_rank(
    batch: int, world: int, micro: int | None
) -> None:
    samples = list(range(100, 100 + batch))
    dealt = [deal.deal(samples, world, rank, micro) for rank in range(world)]
    assert len({len(passes) for passes in dealt}) == 1
    counted = [s for passes in dealt for p in passes if p.weight > 0 for s in p.samples]
    assert sorted(counted) == samples
    for passes in dealt:
        for item in passes:
            assert item.samples
            assert item.weight in (0.0, len(item.samples) / batch)
            assert micro is None or len(item.samples) <= micro


@given(BATCH, st.integers(1, 30), st.integers(0, 5))
def test_an_epoch_of_the_dataset_shows_each_sample_once(batch: int, size: int, seed: int) -> None:
    steps = -(-2 * size // batch)
    seen = [i for step in range(steps) for i in deal.samples_of(step, size, batch, seed)]
    assert sorted(seen[:size]) == list(range(size))
    assert sorted(seen[size : 2 * size]) == list(range(size))


def test_a_step_has_the_same_samples_whenever_it_is_asked() -> None:
    first = deal.samples_of(3, 50, 8, seed=1)
    deal.samples_of(99, 50, 8, seed=2)
    assert deal.samples_of(3, 50, 8, seed=1) == first
    assert deal.samples_of(3, 50, 8, seed=2) != first


def test_without_shuffle_samples_come_in_order_and_wrap() -> None:
    assert deal.samples_of(1, 5, 3, seed=0, shuffle=False) == [3, 4, 0]
