"""The backend behind ``torch.compile(model, backend="pt214")``: stock inductor, with our parts in.

    options -> our settings -> compile_fx -> each graph: our passes and choices -> inductor's code
                                                 | a failure of ours
                                                 v
                                   the same graph by stock, one log line

``mode``, ``dynamic`` and inductor's own ``options`` mean what they mean in stock. A failure inside
our code never reaches the user unless ``options={"pt214.strict": True}``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pt214_inductor import compat, layout, scope, tracing
from pt214_inductor.errors import StrictError
from pt214_inductor.options import Options, split

log = logging.getLogger(__name__)


class Backend:
    """Callable as Dynamo calls backends."""

    __name__ = "pt214"
    one_compile = True  # ``tracing`` holds its settings for backends that say so

    def __call__(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compile one graph that Dynamo captured.

        Args:
            gm: the graph; inductor takes ownership of it.
            example_inputs: fake tensors and symbolic sizes, one for each graph input.
            mode: inductor's modes: ``default``, ``reduce-overhead``, ``max-autotune`` and so on.
            options: inductor's options, and ours, which start with ``pt214.``.

        Raises:
            OptionError: an unknown ``pt214.`` option.
            StrictError: our code failed and ``pt214.strict`` is on.
            RuntimeError: stock's, for an unknown mode or option.
        """
        ours, theirs = split(options)
        asked = compat.stock_config(mode, theirs)
        try:
            patches = scope.assemble(ours, asked)
        except Exception as error:
            if ours.strict:
                raise StrictError(f"setting up failed: {error!r} (pt214.strict is on)") from error
            log.warning("setting up failed, stock inductor serves this graph: %r", error)
            return compat.stock_compile_fx(gm, example_inputs, asked)
        with scope.active(patches):
            return compat.stock_compile_fx(gm, example_inputs, patches, _inner(ours, patches))

    def reset(self) -> None:
        """Called by ``torch._dynamo.reset()``."""
        compat.reset_cudagraphs()


def _inner(options: Options, patches: dict[str, Any]) -> Callable[..., Any]:
    """Inner compile under our scope: the backward's runs when the outer scope is long gone."""
    stock = compat.stock_inner_compile()
    shapes = tracing.shape_settings()

    def found(gm: torch.fx.GraphModule, kwargs: Mapping[str, Any]) -> dict[str, bool]:
        """What the graph itself asks for; a setting that the user made goes over it."""
        return layout.settings(gm, inference=bool(kwargs.get("is_inference")))

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch.fx.experimental import _config as shape_config

        spare = compat.copy_graph(gm)
        with shape_config.patch(shapes):  # type: ignore[attr-defined]
            try:
                with scope.active({**found(gm, kwargs), **patches}):
                    return stock(gm, inputs, **kwargs)
            except StrictError:
                raise
            except Exception as error:
                with scope.stock(patches):
                    served = stock(spare, inputs, **kwargs)
                if options.strict:  # stock compiles it, so the fault is ours
                    raise StrictError(
                        f"compiling failed: {error!r} (pt214.strict is on)"
                    ) from error
                log.warning("compiling failed, stock inductor serves this graph: %r", error)
                return served

    return inner_compile


compile_fx = Backend()
tracing.install()
