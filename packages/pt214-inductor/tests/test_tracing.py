"""One compile serves every size, and the settings that do it are held for our calls alone."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pt214_inductor import tracing
from pt214_inductor.backend import compile_fx
from torch import nn
from torch.fx.experimental import _config as shapes

# Batch 1, height unlike width, equal sizes: the six resolutions of the benchmark, divided by 4.
SIZES = [(16, 32, 32), (8, 24, 40), (4, 56, 56), (1, 64, 64), (3, 25, 19), (32, 14, 14)]
BATCHES_2_TO_15 = [(2, 16, 16), (3, 12, 20), (15, 24, 24)]


@contextmanager
def counting_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """How often AOTAutograd is entered: a compile that is thrown away counts too."""
    module: Any = importlib.import_module("torch._inductor.compile_fx")
    calls: list[Any] = []
    name = "_compile_fx_main" if hasattr(module, "_compile_fx_main") else "aot_autograd"
    stock = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return stock(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    yield calls


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NNPACK and oneDNN guard on the batch on a CPU; without them a CPU traces as CUDA does."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with torch.backends.nnpack.flags(enabled=False):
        yield


@torch.no_grad()
def calls_over(
    sizes: Sequence[tuple[int, int, int]],
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    **kwargs: Any,
) -> int:
    with counting_compiles(monkeypatch) as calls:
        compiled = torch.compile(model, backend=compile_fx, dynamic=True, **kwargs)
        for n, h, w in sizes:
            x = torch.randn(n, 4, h, w)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    return len(calls)


@pytest.mark.usefixtures("as_cuda")
def test_six_resolutions_take_one_compile(
    feature: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls_over(SIZES, feature, monkeypatch, mode="max-autotune", fullgraph=False) == 1


@pytest.mark.usefixtures("as_cuda")
def test_the_count_tells_stock_from_ours(
    feature: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = {"pt214.one_compile": False}
    assert calls_over(SIZES[:2], feature, monkeypatch, options=off) >= 3  # one is thrown away


def test_a_cpus_libraries_leave_one_compile_between_the_batches_they_guard(
    feature: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert calls_over(BATCHES_2_TO_15, feature, monkeypatch) == 1


def test_a_float_argument_stays_symbolic() -> None:
    compiles = 0

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return gm.forward

    backend.one_compile = True  # type: ignore[attr-defined]
    compiled = torch.compile(lambda x, t: x * t, backend=backend, dynamic=True)
    for t in (0.5, 1.5, 2.5, 3.5):
        torch.testing.assert_close(compiled(torch.ones(3), t), torch.full((3,), t))
    assert compiles == 1


def settings() -> tuple[bool, bool]:
    return shapes.use_duck_shape, shapes.backed_size_oblivious


def seen_while_compiling(**kwargs: Any) -> tuple[bool, bool]:
    seen: list[tuple[bool, bool]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Any:
        seen.append(settings())
        return gm.forward

    backend.one_compile = True  # type: ignore[attr-defined]
    torch.compile(lambda x: x + 1, backend=backend, **kwargs)(torch.ones(3))
    return seen[0]


@pytest.mark.parametrize(
    ("kwargs", "held"),
    [
        ({"dynamic": True}, (False, True)),
        ({"dynamic": None}, (False, False)),
        ({"dynamic": False}, (True, False)),
        ({"dynamic": True, "options": {"pt214.one_compile": False}}, (True, False)),
    ],
)
def test_settings_are_held_for_our_compile_and_undone(
    kwargs: dict[str, Any], held: tuple[bool, bool]
) -> None:
    before = settings()
    assert seen_while_compiling(**kwargs) == held
    assert settings() == before


def test_settings_are_undone_when_tracing_raises() -> None:
    before = settings()

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torch.compile(fails, backend=compile_fx, dynamic=True)(torch.ones(3))
    assert settings() == before
    assert not tracing._MODULE_FLOATS_ARE_CONSTANT.get()


def test_a_backend_that_is_not_ours_sees_stocks_settings() -> None:
    seen: list[tuple[bool, bool]] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(settings())
        return gm.forward

    tracing.install()
    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(3))
    assert seen == [(True, False)]
