"""The pass changes the generated code, keeps the numbers, and leaves alone what it must."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from pt214_inductor import compat, explain
from pt214_inductor.backend import compile_fx
from pt214_inductor.compare import generated_sources
from pt214_inductor.counting import loop_nests
from pt214_inductor.passes import hoist_affine
from pt214_inductor.policy.affine import Verdict
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

# Times the error that eager itself makes against float64.
ALLOWED = 1.5


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square: a single largest error is one element's luck."""
    return float((got.double() - exact).pow(2).mean().sqrt())


@torch.no_grad()
def test_batch_norm_gets_one_more_loop_and_no_root_in_the_big_one() -> None:
    model, x = nn.Sequential(nn.BatchNorm2d(8), nn.GELU()).eval(), torch.randn(4, 8, 16, 16)
    found = explain(model, x)
    assert (found.stock.loops, found.ours.loops) == (1, 2)
    hoists = [d for d in found.decisions if d.pass_name == hoist_affine.NAME]
    assert [d.what for d in hoists] == [Verdict.HOIST.value]
    torch._dynamo.reset()
    with generated_sources() as sources, compat.no_caches():
        torch.compile(model, backend=compile_fx)(x)
    small, big = loop_nests(sources[0])
    assert "sqrt" in small
    assert "erf" in big
    assert "sqrt" not in big


@torch.no_grad()
def test_what_does_not_pay_is_left_as_stock_makes_it() -> None:
    norm = nn.Sequential(nn.BatchNorm2d(8), nn.GELU()).eval()
    small = explain(norm, torch.randn(1, 8, 4, 4))
    assert small.ours == small.stock
    assert [d.what for d in small.decisions] == [Verdict.TOO_SMALL.value]


@pytest.mark.cuda
@torch.no_grad()
def test_batch_norm_gets_a_small_kernel_of_its_own_on_the_device() -> None:
    model = nn.Sequential(nn.BatchNorm2d(128), nn.GELU()).eval().cuda().bfloat16()
    found = explain(model, torch.randn(16, 128, 64, 64, device="cuda", dtype=torch.bfloat16))
    assert (found.stock.kernels, found.ours.kernels) == (1, 2)
    assert found.difference <= 2**-5  # one bfloat16 rounding of values up to 8


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_results_stay_within_eagers_own_error(
    feature: Any, dtype: torch.dtype, layout: torch.memory_format
) -> None:
    model = nn.Sequential(feature.norm, nn.GELU()).to(dtype)
    model.eval()
    exact_model = deepcopy(model).double()
    compiled = torch.compile(
        model, backend=compile_fx, dynamic=True, options={"pt214.strict": True}
    )
    for sizes in ((4, 8, 32, 24), (1, 8, 17, 33)):
        x = torch.randn(sizes).to(dtype).to(memory_format=layout)
        exact = exact_model(x.double())
        assert error(compiled(x), exact) <= ALLOWED * error(model(x), exact)


@torch.no_grad()
def test_a_mean_far_above_the_deviation_does_not_cancel() -> None:
    norm = nn.BatchNorm2d(4).eval()
    assert norm.running_mean is not None
    norm.running_mean.fill_(1000.0)
    x = 1000 + torch.randn(4, 4, 32, 32)
    exact = (x.double() - 1000) / (1 + norm.eps) ** 0.5
    compiled = torch.compile(norm, backend=compile_fx, options={"pt214.strict": True})
    assert error(compiled(x), exact) <= 2**-23 * float(exact.pow(2).mean().sqrt())


@torch.no_grad()
def test_frozen_convolutions_are_still_folded(feature: nn.Module) -> None:
    x, model = torch.randn(2, 4, 16, 16), feature
    compiled = torch.compile(
        model, backend=compile_fx, options={"freezing": True, "pt214.strict": True}
    )
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_autocast_gives_eagers_result(feature: nn.Module) -> None:
    model, x = feature, torch.randn(2, 4, 24, 24)
    compiled = torch.compile(model, backend=compile_fx, options={"pt214.strict": True})
    exact = deepcopy(model).double()
    with torch.autocast("cpu", torch.bfloat16):
        eager, ours = model(x), compiled(x)
    assert ours.dtype == eager.dtype
    assert error(ours, exact(x.double())) <= ALLOWED * error(eager, exact(x.double()))


BIG, ROW = torch.randn(64, 64, 64), torch.rand(64) + 1
RUNS = [
    (lambda x, a, b: (x - a) * (b + 1e-5).rsqrt(), 1),
    (lambda x, a, b: ((x * a + b) * b) - a, 1),
    (lambda x, a, b: (x + a) / (b + 1), 1),
    (lambda x, a, b: a + b * x, 0),  # nothing computed, two steps: nothing saved
    (lambda x, a, b: (x - x.mean(0)) * a, 0),  # a reduction's result stays with its loop
    (lambda x, a, b: torch.sub(x, a, alpha=2) * b, 0),  # alpha is no affine step of ours
]


@pytest.mark.parametrize(("fn", "rewritten"), RUNS)
def test_chains_are_found_and_keep_their_value(fn: Any, rewritten: int) -> None:
    args = (BIG, ROW, ROW + 2)
    gm = make_fx(fn, tracing_mode="fake")(*args)
    assert hoist_affine.run(gm.graph) == rewritten
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*args), fn(*args))


def test_a_value_used_twice_inside_the_chain_is_kept() -> None:
    def fn(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = (x - a) * a.sqrt()
        return inner, (inner + a) * a.rsqrt()

    gm = make_fx(fn, tracing_mode="fake")(BIG, ROW)
    assert hoist_affine.run(gm.graph) == 2
    gm.recompile()
    torch.testing.assert_close(gm(BIG, ROW), fn(BIG, ROW))


def test_the_numbers_catch_a_pass_that_drops_the_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = hoist_affine._collapse

    def without_shift(*args: Any) -> Any:
        return (*stock(*args)[:2], None)

    monkeypatch.setattr(hoist_affine, "_collapse", without_shift)
    gm = make_fx(RUNS[1][0], tracing_mode="fake")(BIG, ROW, ROW + 2)
    hoist_affine.run(gm.graph)
    gm.recompile()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(gm(BIG, ROW, ROW + 2), RUNS[1][0](BIG, ROW, ROW + 2))  # type: ignore[no-untyped-call]
