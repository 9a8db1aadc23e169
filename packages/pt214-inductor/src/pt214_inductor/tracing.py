"""One compile for every size: what Dynamo has to trace under, before a backend is ever called.

    call of the compiled function -> [settings held: Dynamo traces -> backend] -> undone

Stock, under ``dynamic=True``, compiles again when height and width stop being equal (equal sizes
share a symbol), when the batch becomes 1 (0 and 1 are specialised), and throws its first compile
away when a module's Python float (BatchNorm's eps) turns out to be needed as a constant. All three
are decided while tracing. Dynamo enters a backend's ``backend_ctx_ctor`` around each call of the
compiled function, but ``torch.compile`` hides that attribute of a backend behind its own wrapper.
:func:`install` makes the wrapper pass it on. It runs when the backend is first looked up and
changes nothing for a backend without a ``context_for``; the settings themselves are held only
while a function compiled by this backend is called.

Floats given as arguments stay symbolic, as in stock: only what hangs off a module is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch

from pt214_inductor import options as options_module

_MODULE_FLOATS_ARE_CONSTANT: ContextVar[bool] = ContextVar("pt214_module_floats", default=False)


class Scope:
    """Holds the settings while one compiled function is called; made anew for each call."""

    __slots__ = ("_changes", "_floats", "_undo")

    def __init__(self, changes: tuple[Callable[[], Callable[[], None]], ...], floats: bool) -> None:
        self._changes = changes
        self._floats = floats
        self._undo: list[Callable[[], Any]] = []

    def __enter__(self) -> Scope:
        self._undo = [change() for change in self._changes]
        if self._floats:
            token = _MODULE_FLOATS_ARE_CONSTANT.set(True)
            self._undo.append(lambda: _MODULE_FLOATS_ARE_CONSTANT.reset(token))
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()


class _PassContextOn:
    """Data descriptor for ``_TorchCompileWrapper.compiler_fn``."""

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        return self if wrapper is None else wrapper.__dict__["compiler_fn"]

    def __set__(self, wrapper: Any, compiler_fn: Any) -> None:
        wrapper.__dict__["compiler_fn"] = compiler_fn
        make = getattr(compiler_fn, "context_for", None)
        if make is not None:
            wrapper.backend_ctx_ctor = make(wrapper)


@cache
def install() -> None:
    """Let torch.compile see our context, and Dynamo our rule for floats. Done once."""
    from torch._dynamo import config
    from torch._dynamo.variables.builder import VariableBuilder

    torch._TorchCompileWrapper.compiler_fn = _PassContextOn()  # type: ignore[assignment]
    stock: Any = VariableBuilder.wrap_symfloat

    def wrap_symfloat(self: Any, value: float) -> Any:
        if _MODULE_FLOATS_ARE_CONSTANT.get() and _hangs_off_a_module(self.get_source()):
            with config.patch(specialize_float=True):
                return stock(self, value)
        return stock(self, value)

    VariableBuilder.wrap_symfloat = wrap_symfloat  # type: ignore[method-assign]


def context_for(wrapper: Any) -> Callable[[], Scope]:
    """The context constructor for one ``torch.compile`` call; read late, since kwargs come late."""
    prepared: list[tuple[tuple[Any, ...], bool]] = []

    def make() -> Scope:
        if not prepared:
            ours, _ = options_module.split(wrapper.kwargs.get("options"))
            prepared.append(_changes(wrapper.dynamic, ours.one_compile))
        return Scope(*prepared[0])

    return make


def _changes(dynamic: bool | None, one_compile: bool) -> tuple[tuple[Any, ...], bool]:
    if dynamic is False or not one_compile:
        return (), False
    from torch.fx.experimental import _config as shapes

    held: dict[str, Any] = {"use_duck_shape": False}
    if dynamic:
        held["backed_size_oblivious"] = True
    return (shapes._make_closure_patcher(**held),), bool(dynamic)  # type: ignore[attr-defined]


def shape_settings() -> dict[str, Any]:
    """Settings that a lazily compiled backward has to see again: it runs after the call's scope."""
    from torch.fx.experimental import _config as shapes

    return {"backed_size_oblivious": shapes.backed_size_oblivious}


def _hangs_off_a_module(source: Any) -> bool:
    return bool(source.guard_source.is_unspecialized_nn_module()) or bool(
        source.guard_source.is_specialized_nn_module()
    )
