"""The backend as users meet it: modes, training, options, failures, and what it leaves behind."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pt214_inductor.backend import compile_fx
from pt214_inductor.errors import OptionError, StrictError
from pt214_inductor.passes import hoist_affine
from torch import nn

STRICT: Any = {"pt214.strict": True}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())


def test_torch_finds_it_by_name_without_an_import() -> None:
    assert "pt214" in torch._dynamo.list_backends()
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    compiled = torch.compile(linear, backend="pt214")
    torch.testing.assert_close(compiled(x), linear(x))


def test_training_gives_eagers_gradients_and_running_statistics() -> None:
    ours, eager = model(), model()
    x = torch.randn(2, 4, 16, 16)
    compiled = torch.compile(ours, backend=compile_fx, options=STRICT)
    compiled(x).square().mean().backward()
    eager(x).square().mean().backward()
    for (name, got), (_, want) in zip(
        ours.named_parameters(), eager.named_parameters(), strict=True
    ):
        torch.testing.assert_close(got.grad, want.grad, msg=name, rtol=1e-4, atol=1e-6)
    for buffer, expected in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected)


@torch.no_grad()
def test_max_autotune_with_fullgraph_serves_inference() -> None:
    eager, x = model().eval(), torch.randn(2, 4, 16, 16)
    compiled = torch.compile(eager, backend=compile_fx, mode="max-autotune", fullgraph=True)
    torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_compile_serves_equal_and_unequal_sizes() -> None:
    """Stock needs more than one.

    Batches 2 to 15 only: on the CPU torch chooses a convolution's library by the batch, with
    guards at 1 and 16 that no setting of ours removes.
    """
    sizes = [(2, 16, 16), (3, 12, 20), (4, 24, 24), (5, 8, 24)]

    def compiles(backend: Any) -> int:
        torch._dynamo.reset()
        count = 0

        def counting(gm: Any, inputs: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return backend(gm, inputs, **kwargs)

        if hasattr(backend, "context_for"):
            counting.context_for = backend.context_for  # type: ignore[attr-defined]
            counting.reset = backend.reset  # type: ignore[attr-defined]
        eager = model().eval()
        compiled = torch.compile(eager, backend=counting, dynamic=True)
        for batch, height, width in sizes:
            x = torch.randn(batch, 4, height, width)
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)
        return count

    from torch._inductor.compile_fx import compile_fx as stock

    assert compiles(stock) > 1
    assert compiles(compile_fx) == 1


def test_an_unknown_option_of_ours_is_refused() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend=compile_fx, options={"pt214.fast": True})
    with pytest.raises((OptionError, torch._dynamo.exc.BackendCompilerFailed), match="known names"):
        compiled(torch.randn(1, 2))


def _fail(graph: Any) -> int:
    raise RuntimeError("planted")


@torch.no_grad()
def test_a_failure_of_ours_falls_back_to_stock_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hoist_affine, "run", _fail)
    eager, x = model().eval(), torch.randn(2, 4, 16, 16)
    with caplog.at_level(logging.WARNING, "pt214_inductor"):
        got = torch.compile(eager, backend=compile_fx)(x)
    torch.testing.assert_close(got, eager(x), rtol=1e-4, atol=1e-5)
    assert [r.message for r in caplog.records if "planted" in r.message] == [
        "pass hoist_affine failed, stock inductor serves this graph: RuntimeError('planted')"
    ]


@torch.no_grad()
def test_strict_raises_it_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoist_affine, "run", _fail)
    compiled = torch.compile(model().eval(), backend=compile_fx, options=STRICT)
    with pytest.raises((StrictError, torch._dynamo.exc.BackendCompilerFailed), match="planted"):
        compiled(torch.randn(2, 4, 16, 16))


def test_a_later_stock_compile_never_runs_our_passes_lazy_backward_included(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _counted(monkeypatch)
    x = torch.randn(2, 4, 16, 16)
    torch.compile(model(), backend=compile_fx)(x).sum().backward()
    assert calls  # forward and backward were ours
    calls.clear()
    torch._dynamo.reset()
    pending = torch.compile(model(), backend="inductor")(x).sum()
    torch.compile(nn.Linear(3, 3), backend=compile_fx)(torch.randn(1, 3))
    calls.clear()
    pending.backward()  # stock's backward, compiled after a compile of ours
    assert calls == []


@torch.no_grad()
def test_an_artifact_that_stock_cached_is_not_served_as_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eager, x = model().eval(), torch.randn(2, 4, 33, 17)
    torch.compile(eager, backend="inductor")(x)
    torch._dynamo.reset()
    calls = _counted(monkeypatch)
    torch.compile(eager, backend=compile_fx)(x)
    assert calls


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    run: Callable[[Any], int] = hoist_affine.run

    def counting(graph: Any) -> int:
        calls.append("run")
        return run(graph)

    monkeypatch.setattr(hoist_affine, "run", counting)
    return calls
