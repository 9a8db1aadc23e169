"""Where the article's block takes BatchNorm's root: stock for each element, ours for each channel.

Both generate as many kernels and loops. Stock's oneDNN convolution is followed by two passes over
the whole result, one of them with the root; ours by a loop over the channels and one pass.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from pt214_inductor import compat
from pt214_inductor.backend import compile_fx
from pt214_inductor.compare import generated_sources
from pt214_inductor.counting import Counts, count, loop_nests
from pt214_inductor.ops import materialise
from torch import nn

BATCH, CHANNELS, SIDE = 2, 128, 8
ELEMENTS = BATCH * CHANNELS * SIDE * SIDE
BOUND = re.compile(r"for\(int64_t x\d+=.*?<static_cast<int64_t>\((\d+)L+\)")


@dataclass(frozen=True)
class Loop:
    """One loop nest of the generated C++."""

    elements: int  # product of its bounds
    has_root: bool
    has_erf: bool  # GELU's, which marks the epilogue


@dataclass(frozen=True)
class Generated:
    counts: Counts
    loops: list[Loop]

    def over_the_result(self) -> list[Loop]:
        return [loop for loop in self.loops if loop.elements == ELEMENTS]


def generated(backend: Any, options: dict[str, Any] | None = None) -> Generated:
    torch._dynamo.reset()
    conv = nn.Conv2d(64, CHANNELS, 3, padding=1)
    block = nn.Sequential(conv, nn.BatchNorm2d(CHANNELS), nn.GELU()).eval()
    with torch.no_grad(), generated_sources() as sources, compat.no_caches():
        torch.compile(block, backend=backend, options=options)(torch.randn(BATCH, 64, SIDE, SIDE))
    (source,) = sources
    return Generated(count(sources), [loop(nest) for nest in loop_nests(source)])


def loop(nest: str) -> Loop:
    return Loop(prod(map(int, BOUND.findall(nest))), "sqrt" in nest, "erf" in nest)


def roots_are_hoisted(ours: Generated, stock: Generated) -> bool:
    """One root a channel, none a pixel, and no pass over the result more than stock has."""
    return (
        [each.elements for each in ours.loops if each.has_root] == [CHANNELS]
        and any(each.has_erf for each in ours.over_the_result())
        and len(ours.over_the_result()) <= len(stock.over_the_result())
    )


@pytest.fixture(scope="module")
def stock() -> Generated:
    return generated("inductor")


@pytest.fixture(scope="module")
def ours() -> Generated:
    return generated(compile_fx, {"pt214.strict": True})


def test_stock_takes_the_root_of_every_element(stock: Generated) -> None:
    assert [each.elements for each in stock.loops if each.has_root] == [ELEMENTS]
    assert not roots_are_hoisted(stock, stock)


def test_ours_takes_it_once_a_channel_and_adds_no_pass(ours: Generated, stock: Generated) -> None:
    assert roots_are_hoisted(ours, stock)


def test_equal_counts_hide_the_difference(ours: Generated, stock: Generated) -> None:
    assert (ours.counts.kernels, ours.counts.loops) == (stock.counts.kernels, stock.counts.loops)


def test_a_twin_without_the_pass_is_caught(stock: Generated) -> None:
    twin = generated(compile_fx, {"pt214.strict": True, "pt214.hoist": False})
    assert not roots_are_hoisted(twin, stock)


@contextmanager
def inlined_again() -> Iterator[None]:
    """The op is in the graph, but its lowering gives the coefficients no buffer."""
    from torch._inductor.lowering import lowerings

    materialise.register_lowering()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(lowerings, materialise.overload(), lambda x: x)
        yield


def test_a_twin_that_inductor_inlines_again_is_caught(stock: Generated) -> None:
    with inlined_again():
        twin = generated(compile_fx, {"pt214.strict": True})
    assert not roots_are_hoisted(twin, stock)
