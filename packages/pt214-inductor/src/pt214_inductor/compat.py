"""What torch 2.11 to 2.14 do differently, and every private name of torch that this part leans on.

Nothing is imported from ``torch._inductor`` until a function is called: importing this module
starts no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def stock_config(mode: str | None, options: dict[str, Any] | None) -> dict[str, Any]:
    """Inductor's settings for ``mode`` and ``options``, checked by stock's own wrapper.

    Raises:
        RuntimeError: stock's, for an unknown mode, option or type.
    """
    wrapper: Any = torch._TorchCompileInductorWrapper(mode, options, None)
    return dict(wrapper.config)


def stock_compile_fx(
    gm: torch.fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    inner_compile: Callable[..., Any] | None = None,
) -> Any:
    """``compile_fx`` as stock's wrapper calls it."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: Any = inner_compile or compile_fx_inner
    return compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)


def stock_inner_compile() -> Callable[..., Any]:
    """The function that turns one lowered graph, forward or backward, into code."""
    from torch._inductor.compile_fx import compile_fx_inner

    return compile_fx_inner


@contextmanager
def choices_handler(factory: Callable[[], Any]) -> Iterator[None]:
    """Serve ``factory``'s choices in this thread until the block ends.

    ``config.inductor_choices_class`` alone would be read once in a thread's life and kept, so the
    next stock compile would be decided by ours.
    """
    from torch._inductor.virtualized import V

    with V.set_choices_handler(factory()):
        yield


def inductor_patch(patches: dict[str, Any]) -> Any:
    """Context manager that holds inductor settings."""
    from torch._inductor import config

    return config.patch(patches)


def inductor_setting(name: str) -> Any:
    """Inductor's present value of one setting."""
    from torch._inductor import config

    return getattr(config, name)


@contextmanager
def no_caches() -> Iterator[None]:
    """Compile anew inside the block; ``force_disable_caches`` would warn, so not that."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    with (
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch.patch(enable_autograd_cache=False),
    ):
        yield


def copy_graph(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A second graph over the same parameters: inductor takes ownership of the one it is given."""
    graph = torch.fx.Graph()
    output = graph.graph_copy(gm.graph, {}, return_output_node=True)
    if isinstance(output, tuple):
        value, old = output
        node = graph.output(value)
        node.meta = dict(old.meta)
    graph._codegen = gm.graph._codegen
    twin = torch.fx.GraphModule(gm, graph)
    twin.meta = dict(gm.meta)
    return twin


def size_hint(size: Any) -> int | None:
    """The number that a size had while tracing, or None when it has none."""
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if isinstance(hint, int) else None


def reset_cudagraphs() -> None:
    """Drop recorded CUDA graphs, as stock's wrapper does on ``torch._dynamo.reset()``."""
    import sys

    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
