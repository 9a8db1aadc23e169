"""The plan against torch's own offsets, and against the simplest truth: every element once."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pt214_dcp import plan as planning
from pt214_dcp.layout import Box, Item, Layout, Mesh, Split, local_boxes
from pt214_dcp.plan import plan
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

KINDS = ["replicate", "shard", "strided"]
Case = tuple[tuple[int, ...], Layout, list[Any]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=0, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    splits: list[Split | None] = []
    placements: list[Any] = []
    for _ in mesh:
        kind = draw(st.sampled_from(KINDS)) if shape else "replicate"
        dim = draw(st.integers(0, max(0, len(shape) - 1)))
        parts = draw(st.integers(2, 3))
        splits.append({"replicate": None, "shard": Split(dim), "strided": Split(dim, parts)}[kind])
        placements.append(
            {
                "replicate": Replicate(),
                "shard": Shard(dim),
                "strided": _StridedShard(dim, split_factor=parts),
            }[kind]
        )
    ranks = tuple(range(math.prod(mesh)))
    return shape, Layout(Mesh(mesh, ranks), tuple(splits)), placements


@settings(deadline=None, max_examples=300)
@given(cases())
def test_local_boxes_have_the_shape_and_first_offset_that_torch_computes(case: Case) -> None:
    shape, place, placements = case
    for rank in place.mesh.ranks:
        coordinate = place.mesh.coordinate(rank)
        assert coordinate is not None
        local, offset = _compute_local_shape_and_global_offset(
            shape, place.mesh.shape, list(coordinate), placements
        )
        held = local_boxes(shape, place, rank)
        assert sum(part.box.numel for part in held) == math.prod(local)
        if held:
            assert held[0].box.start == tuple(offset)
            ends = [
                part.local.start[d] + part.local.size[d] for part in held for d in range(len(shape))
            ]
            sizes = [max(ends[d :: len(shape)]) for d in range(len(shape))]
            assert sizes == list(local)


@settings(deadline=None, max_examples=300)
@given(cases(), st.booleans())
def test_every_element_has_exactly_one_writer(case: Case, divide: bool) -> None:
    shape, place, _ = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "DIVIDE_FROM_BYTES", 8 if divide else 1 << 20)
        seen = writers(shape, place)
    assert bool((seen == 1).all())


def writers(shape: tuple[int, ...], place: Layout) -> torch.Tensor:
    seen = torch.zeros(shape, dtype=torch.int64)
    item = Item("w", 4, shape, place)
    for rank in place.mesh.ranks:
        for _, part in plan([item], rank):
            seen[part.box.inside(Box((0,) * len(shape), shape))] += 1
    return seen


def test_a_planner_that_forgets_a_rank_fails_the_cover_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Layout(Mesh((4,), (0, 1, 2, 3)), (None,))
    monkeypatch.setattr(planning, "DIVIDE_FROM_BYTES", 8)
    assert bool((writers((8, 3), place) == 1).all())
    monkeypatch.setattr(Mesh, "coordinate", lambda self, rank: None if rank == 2 else (rank,))
    assert not bool((writers((8, 3), place) == 1).all())


def test_replicas_share_the_bytes_evenly() -> None:
    place = Layout(Mesh((4,), (0, 1, 2, 3)), (None,))
    items = [Item(f"w{at}", 4, (at % 7 + 1, 1000), place) for at in range(300)]
    items.append(Item("big", 4, (1000, 4096), place))
    loads = [sum(p.box.numel for _, p in plan(items, rank)) for rank in place.mesh.ranks]
    assert max(loads) <= 1.01 * min(loads)


def test_strided_shards_of_one_rank_are_several_boxes() -> None:
    place = Layout(Mesh((2, 2), (0, 1, 2, 3)), (Split(0, 2), Split(0)))
    starts = [[h.box.start[0] for h in local_boxes((8,), place, rank)] for rank in range(4)]
    # Axis 0 takes 0, 1 and 4, 5 or 2, 3 and 6, 7; axis 1 halves what axis 0 took.
    assert starts == [[0], [4], [2], [6]]


def test_overlap_of_boxes_is_what_slicing_says() -> None:
    for a, n, b, m in product(range(4), range(1, 4), range(4), range(1, 4)):
        found = Box((a,), (n,)).overlap(Box((b,), (m,)))
        common = sorted(set(range(a, a + n)) & set(range(b, b + m)))
        assert (found and list(range(found.start[0], found.start[0] + found.size[0]))) == (
            common or None
        )
