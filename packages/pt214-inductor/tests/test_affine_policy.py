from dataclasses import replace

import pytest
from pt214_inductor.policy.affine import MIN_ELEMENTS, MIN_ELEMENTS_CPU, Chain, Verdict, decide

BATCH_NORM = Chain(elements=2**25, coefficients=128, steps=4, inlined_ops=3, device="cuda")


def test_an_eval_batch_norm_of_a_real_size_is_hoisted() -> None:
    assert decide(BATCH_NORM) is Verdict.HOIST


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({"steps": 1}, Verdict.NOTHING_SAVED),
        ({"steps": 2, "inlined_ops": 0}, Verdict.NOTHING_SAVED),
        ({"elements": MIN_ELEMENTS - 1}, Verdict.TOO_SMALL),
        ({"elements": MIN_ELEMENTS_CPU - 1, "device": "cpu"}, Verdict.TOO_SMALL),
        ({"elements": 2**25, "coefficients": 2**20}, Verdict.LOW_REUSE),
    ],
)
def test_each_reason_to_leave_a_chain_alone(change: dict[str, object], verdict: Verdict) -> None:
    assert decide(replace(BATCH_NORM, **change)) is verdict  # type: ignore[arg-type]


def test_the_edge_itself_is_hoisted() -> None:
    assert decide(replace(BATCH_NORM, elements=MIN_ELEMENTS)) is Verdict.HOIST
