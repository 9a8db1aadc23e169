"""The pass changes what inductor generates: one more loop nest, no square root in the big one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pt214_inductor import explain
from pt214_inductor.backend import compile_fx
from pt214_inductor.ops import materialise
from pt214_inductor.passes import hoist_affine
from pt214_inductor.policy.affine import Verdict
from torch import nn


def batch_norm_gelu(channels: int = 8) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm2d(channels), nn.GELU())
    norm: Any = model[0]
    with torch.no_grad():
        norm.running_mean.normal_(3, 2)
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
        norm.bias.normal_()
    return model.eval()


@torch.no_grad()
def test_batch_norms_coefficients_get_a_loop_of_their_own() -> None:
    x = torch.randn(4, 8, 32, 32)
    model = batch_norm_gelu()
    found = explain(model, x)
    assert found.stock.loops == 1
    assert found.ours.loops == 2
    assert [d.what for d in found.decisions] == [Verdict.HOIST.value]
    assert found.difference < 1e-5

    wide = model.double()(x.double())
    model.float()
    ours = torch.compile(model, backend=compile_fx)(x)
    eager_error = (model(x).double() - wide).square().mean().sqrt()
    assert (ours.double() - wide).square().mean().sqrt() <= 1.5 * eager_error


@contextmanager
def without_a_buffer() -> Iterator[None]:
    """The broken twin: coefficients are marked, but inductor may inline them again."""
    from torch._inductor.lowering import lowerings

    overload = materialise.overload()
    before = lowerings[overload]
    lowerings[overload] = lambda x: x
    try:
        yield
    finally:
        lowerings[overload] = before


@torch.no_grad()
def test_the_count_notices_a_pass_that_changes_nothing() -> None:
    x = torch.randn(4, 8, 32, 32)
    explain(batch_norm_gelu(), x)  # registers the lowering that the twin replaces
    with without_a_buffer():
        broken = explain(batch_norm_gelu(), x)
    assert broken.ours.loops == broken.stock.loops == 1


@torch.no_grad()
def test_what_does_not_pay_is_left_as_stock_makes_it() -> None:
    small = explain(batch_norm_gelu(), torch.randn(1, 8, 4, 4))
    assert small.ours == small.stock
    assert [d.what for d in small.decisions] == [Verdict.TOO_SMALL.value]
    plain = explain(lambda x: torch.relu(x) + 1, torch.randn(64, 1024))
    assert plain.decisions == ()
    assert plain.ours == plain.stock


@torch.no_grad()
def test_the_option_turns_the_pass_off(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def run(graph: Any) -> int:
        calls.append(graph)
        return 0

    monkeypatch.setattr(hoist_affine, "run", run)
    x, model = torch.randn(5, 8, 32, 32), batch_norm_gelu()  # a size that no test has cached
    off = torch.compile(model, backend=compile_fx, options={"pt214.hoist": False})
    torch.testing.assert_close(off(x), model(x), rtol=1e-5, atol=1e-5)
    assert calls == []
    torch._dynamo.reset()
    torch.compile(model, backend=compile_fx)(x)
    assert len(calls) == 1


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_chains_of_every_operation_keep_their_value(memory_format: torch.memory_format) -> None:
    x = torch.randn(2, 16, 24, 24).to(memory_format=memory_format)
    a, b, c, d = (torch.rand(16, 1, 1) + 0.5 for _ in range(4))

    def chain(x: torch.Tensor) -> torch.Tensor:
        return ((x + a.sqrt()) / b.sqrt() - c) * d.reciprocal()

    compiled = torch.compile(chain, backend=compile_fx, options={"pt214.strict": True})
    torch.testing.assert_close(compiled(x), chain(x), rtol=2e-5, atol=2e-5)
