"""The pure decisions, on, below and above each threshold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pt214_inductor.policy.affine import MIN_ELEMENTS, MIN_REUSE, Chain, Verdict, decide
from pt214_inductor.policy.layout import MIN_CHANNELS, Convolution, channels_last_wins

CHAIN = Chain(elements=MIN_ELEMENTS, coefficients=128, steps=4, inlined_ops=3, device="cuda")
CONV = Convolution("cuda", in_channels=64, out_channels=128, groups=1, symbolic=True)


@pytest.mark.parametrize(
    ("chain", "verdict"),
    [
        (CHAIN, Verdict.HOIST),
        (replace(CHAIN, elements=MIN_ELEMENTS - 1), Verdict.TOO_SMALL),
        (replace(CHAIN, elements=1 << 13, device="cpu"), Verdict.HOIST),
        (replace(CHAIN, coefficients=MIN_ELEMENTS // MIN_REUSE), Verdict.HOIST),
        (replace(CHAIN, coefficients=MIN_ELEMENTS // MIN_REUSE + 1), Verdict.LOW_REUSE),
        (replace(CHAIN, steps=1), Verdict.NOTHING_SAVED),
        (replace(CHAIN, steps=2, inlined_ops=0), Verdict.NOTHING_SAVED),
        (replace(CHAIN, steps=2, inlined_ops=1), Verdict.HOIST),
    ],
)
def test_hoisting_pays_only_where_it_saves_work_and_hides_a_launch(
    chain: Chain, verdict: Verdict
) -> None:
    assert decide(chain) is verdict


@given(elements=st.integers(0, 2**34), factor=st.integers(1, 64))
def test_more_elements_never_turn_a_yes_into_a_no(elements: int, factor: int) -> None:
    if decide(replace(CHAIN, elements=elements)) is Verdict.HOIST:
        assert decide(replace(CHAIN, elements=elements * factor)) is Verdict.HOIST


@pytest.mark.parametrize(
    ("convolutions", "inference", "wins"),
    [
        ([CONV], True, True),
        ([CONV], False, False),
        ([replace(CONV, symbolic=False)], True, False),
        ([CONV, replace(CONV, symbolic=False)], True, True),
        ([CONV, replace(CONV, groups=2)], True, False),
        ([replace(CONV, in_channels=MIN_CHANNELS - 1)], True, False),
        ([replace(CONV, device="cpu")], True, False),
        ([], True, False),
    ],
)
def test_channels_last_is_forced_for_the_measured_kind_alone(
    convolutions: list[Convolution], inference: bool, wins: bool
) -> None:
    assert channels_last_wins(convolutions, inference=inference) is wins
