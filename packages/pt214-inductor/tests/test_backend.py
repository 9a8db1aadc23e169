"""The backend: stock's modes and gradients, its neighbours untouched, failures served by stock."""

import logging
from copy import deepcopy
from typing import Any

import pytest
import torch
from pt214_inductor import choices
from pt214_inductor.backend import Backend, compile_fx
from pt214_inductor.errors import StrictError
from pt214_inductor.passes import hoist_affine
from pt214_inductor.record import listening
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.choices import InductorChoices

STRICT: Any = {"pt214.strict": True}


def norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(8), nn.GELU()).eval()


def test_training_gives_eagers_gradients_and_running_statistics() -> None:
    eager, x = nn.Sequential(nn.BatchNorm2d(8), nn.GELU()), torch.randn(4, 8, 8, 8)
    model = deepcopy(eager)
    compiled = torch.compile(model, backend=compile_fx, fullgraph=True, options=STRICT)
    for each in (eager, compiled):
        each(x).square().sum().backward()
    got, wanted = ([p.grad for p in m.parameters()] for m in (model, eager))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(list(model.buffers()), list(eager.buffers()))


@pytest.mark.parametrize("mode", ["default", "max-autotune", "reduce-overhead"])
def test_modes_are_stocks_modes(mode: str) -> None:
    x = torch.randn(7)
    compiled = torch.compile(torch.sin, backend=compile_fx, mode=mode, dynamic=False)
    torch.testing.assert_close(compiled(x), x.sin())


def test_an_unknown_mode_is_stocks_error() -> None:
    compiled = torch.compile(torch.sin, backend=compile_fx, mode="maximal")
    with pytest.raises(BackendCompilerFailed, match="Unrecognized mode=maximal"):
        compiled(torch.ones(2))


def test_an_unknown_option_of_ours_is_named() -> None:
    compiled = torch.compile(torch.sin, backend=compile_fx, options={"pt214.fast": True})
    with pytest.raises(Exception, match=r"got 'pt214.fast', known names are"):
        compiled(torch.ones(2))


class Spy(choices.Choices):
    """Counts how often inductor asks."""

    calls = 0

    @staticmethod
    def can_fuse(*args: Any, **kwargs: Any) -> bool:
        """As stock, counted."""
        Spy.calls += 1
        return InductorChoices.can_fuse(*args, **kwargs)


def reduce(x: torch.Tensor) -> torch.Tensor:
    return (x.softmax(-1) * 2).sum(0).cos().sum()


def test_our_choices_never_decide_a_later_stock_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "Choices", Spy)
    monkeypatch.setattr(Spy, "calls", 0)
    x = torch.randn(8, 16, requires_grad=True)
    result = torch.compile(reduce, backend=compile_fx, options=STRICT)(x)
    forward = Spy.calls
    assert forward > 0
    torch._dynamo.reset()
    stock = torch.compile(lambda x: reduce(x) + 1)(x)  # between our forward and our backward
    stock.backward()  # type: ignore[no-untyped-call]
    assert Spy.calls == forward
    result.backward()  # type: ignore[no-untyped-call]
    assert Spy.calls > forward  # the lazy backward is ours again


@torch.no_grad()
def test_stocks_artifact_never_serves_us_nor_ours_stock() -> None:
    model, x = norm(), torch.randn(4, 8, 16, 16)
    torch.compile(model)(x)
    for options, hoisted in ((STRICT, 1), ({**STRICT, "pt214.hoist": False}, 0)):
        torch._dynamo.reset()
        with listening() as decisions:
            torch.compile(model, backend=compile_fx, options=options)(x)
        assert sum(d.pass_name == hoist_affine.NAME for d in decisions) == hoisted
    torch._dynamo.reset()
    with listening() as decisions:
        torch.compile(model)(x)
        torch.compile(nn.Sequential(model, nn.Tanh()))(x)
    assert decisions == []


@torch.no_grad()
def test_our_own_artifact_serves_us() -> None:
    model, x = norm(), torch.randn(4, 8, 16, 16)
    for expected in (1, 0):
        torch._dynamo.reset()
        with listening() as decisions:
            torch.compile(model, backend=compile_fx, options=STRICT)(x)
        assert len(decisions) == expected


def broken(*_: Any) -> int:
    raise ZeroDivisionError("broken on purpose")


@torch.no_grad()
@pytest.mark.parametrize("where", ["run", "rewrite"])
def test_a_failing_pass_is_served_by_stock_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    monkeypatch.setattr(hoist_affine, where, broken)
    model, x = norm(), torch.randn(4, 8, 16, 16)
    with caplog.at_level(logging.WARNING, logger="pt214_inductor"):
        got = torch.compile(model, backend=compile_fx)(x)
    torch.testing.assert_close(got, model(x))
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("pt214_inductor")]
    assert len(lines) == 1
    assert lines[0].startswith("pass hoist_affine failed, stock inductor serves this graph")
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(model, backend=compile_fx, options=STRICT)(x)
    assert isinstance(raised.value.inner_exception, StrictError)


@torch.no_grad()
def test_a_failing_lowering_is_served_by_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from pt214_inductor.ops import materialise
    from torch._inductor.lowering import lowerings

    materialise.register_lowering()
    monkeypatch.setitem(lowerings, materialise.overload(), broken)
    model, x = norm(), torch.randn(4, 8, 16, 16)
    with caplog.at_level(logging.WARNING, logger="pt214_inductor"):
        got = torch.compile(model, backend=compile_fx)(x)
    torch.testing.assert_close(got, model(x))
    assert "compiling failed, stock inductor serves this graph" in caplog.text


def test_a_users_own_pass_still_runs() -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Mine(CustomGraphPass):
        seen = 0

        def __call__(self, graph: torch.fx.Graph) -> None:
            Mine.seen += 1

        def uuid(self) -> str:
            return "mine"

    compiled = torch.compile(
        torch.sin, backend=compile_fx, options={"post_grad_custom_pre_pass": Mine(), **STRICT}
    )
    compiled(torch.ones(3))
    assert Mine.seen == 1


def test_a_user_set_layout_is_in_the_key() -> None:
    from pt214_inductor import scope
    from pt214_inductor.options import Options

    keys = {
        scope.assemble(Options(), theirs)[scope.PASSES].uuid()
        for theirs in ({}, {"force_layout_optimization": False})
    }
    assert len(keys) == 2


def test_the_backend_object_is_one_for_the_process() -> None:
    assert isinstance(compile_fx, Backend)
    assert compile_fx.__name__ == "pt214"
