"""One compile for every size: what Dynamo has to trace under, before a backend is ever called.

    guards miss -> Dynamo's frame converter -> [settings held: trace -> backend -> guards] -> undone

Stock, under ``dynamic=True``, compiles again when height and width stop being equal (equal sizes
share a symbol), when the batch becomes 1 (0 and 1 are specialised), and throws its first compile
away when a module's Python float (BatchNorm's eps) turns out to be needed as a constant. All three
are decided while tracing, so a backend, called at the end of it, is too late. :func:`install` wraps
Dynamo's frame converter, which runs on a cache miss alone and knows its backend: a compiled call
costs nothing more, and a stock compile never sees the settings. The wrapping is done when the
backend is first looked up.

Floats given as arguments stay symbolic, as in stock: only what hangs off a module is a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

from pt214_inductor.errors import OptionError
from pt214_inductor.options import split

_MODULE_FLOATS_ARE_CONSTANT: ContextVar[bool] = ContextVar("pt214_module_floats", default=False)


@cache
def install() -> None:
    """Let Dynamo convert frames for our backend under our settings. Done once."""
    from torch._dynamo import config
    from torch._dynamo.convert_frame import ConvertFrameAssert
    from torch._dynamo.variables.builder import VariableBuilder

    stock_convert: Any = ConvertFrameAssert.__call__
    stock_float: Any = VariableBuilder.wrap_symfloat

    @wraps(stock_convert)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["skip"] = kwargs.get("skip", 0) + 1  # this frame is none of the user's
        with _scope_of(self._torchdynamo_orig_backend):
            return stock_convert(self, *args, **kwargs)

    @wraps(stock_float)
    def wrap_symfloat(self: Any, value: float) -> Any:
        if _MODULE_FLOATS_ARE_CONSTANT.get() and _hangs_off_a_module(self.get_source()):
            with config.patch(specialize_float=True):
                return stock_float(self, value)
        return stock_float(self, value)

    ConvertFrameAssert.__call__ = convert  # type: ignore[method-assign]
    VariableBuilder.wrap_symfloat = wrap_symfloat  # type: ignore[method-assign]


def _scope_of(backend: Any) -> AbstractContextManager[None]:
    """The settings for one compile, found behind Dynamo's wrappers of the backend."""
    while not hasattr(backend, "compiler_fn") and hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    if not getattr(getattr(backend, "compiler_fn", None), "one_compile", False):
        return nullcontext()
    try:
        ours, _ = split(backend.kwargs.get("options"))
    except OptionError:
        return nullcontext()  # the backend itself will say so
    return held(backend.dynamic) if ours.one_compile else nullcontext()


@contextmanager
def held(dynamic: bool | None) -> Iterator[None]:
    """Hold the settings that ``torch.compile(dynamic=dynamic)`` needs."""
    from torch.fx.experimental import _config as shapes

    if dynamic is False:
        yield
        return
    oblivious = {"backed_size_oblivious": True} if dynamic else {}
    token = _MODULE_FLOATS_ARE_CONSTANT.set(bool(dynamic))
    try:
        with shapes.patch(use_duck_shape=False, **oblivious):  # type: ignore[attr-defined]
            yield
    finally:
        _MODULE_FLOATS_ARE_CONSTANT.reset(token)


def shape_settings() -> dict[str, Any]:
    """Settings that a lazily compiled backward has to see again: it runs after the scope."""
    from torch.fx.experimental import _config as shapes

    return {"backed_size_oblivious": shapes.backed_size_oblivious}


def _hangs_off_a_module(source: Any) -> bool:
    return bool(source.guard_source.is_unspecialized_nn_module()) or bool(
        source.guard_source.is_specialized_nn_module()
    )
