"""The table of ``check``: operator by operator, what would run it on MPS."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from pt214_mps.coverage.truth import Truth
from pt214_mps.errors import ArgumentError

__all__ = ["COMMON", "OURS", "Entry", "Runs", "table"]


class Runs(enum.Enum):
    """What runs an operator on an MPS tensor."""

    STOCK = "stock MPS kernel"
    OURS = "pt214-mps kernel"
    COMPOSITE = "made of other operators"
    NONE = "no MPS kernel: an error, or the CPU where the fallback switch is on"


# Operators of ours, by the aten operator whose work they do. Reached through pt214_mps, not aten.
OURS = {
    "rms_norm": "pt214_mps.rms_norm",
    "_fused_rms_norm_backward": "backward of pt214_mps.rms_norm",
}

# What training and inference of transformers and convolutional networks call most, and the
# operators that people report missing.
COMMON = (
    "mm", "bmm", "addmm", "linear", "convolution", "native_batch_norm", "native_layer_norm",
    "native_layer_norm_backward", "rms_norm", "_fused_rms_norm", "_fused_rms_norm_backward",
    "native_group_norm", "embedding", "embedding_dense_backward", "_softmax", "_log_softmax",
    "_softmax_backward_data", "nll_loss_forward", "gelu", "gelu_backward", "silu", "relu",
    "native_dropout", "scaled_dot_product_attention", "_scaled_dot_product_attention_math_for_mps",
    "cat", "index.Tensor", "index_put", "gather", "scatter.src", "topk", "sort", "cumsum",
    "upsample_bilinear2d", "max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool3d",
    "grid_sampler_2d", "_int_mm", "_scaled_mm", "linalg_eig", "_linalg_eigvals", "linalg_svd",
    "_linalg_svd", "linalg_qr", "_cdist_forward", "_pdist_forward", "mode", "segment_reduce",
    "fractional_max_pool2d", "heaviside", "logspace", "take", "put", "multinomial", "bernoulli",
    "_foreach_add.List", "_fused_adamw_", "_fft_c2c", "roll",
)  # fmt: skip


_WELL_FORMED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", re.ASCII)
_SHOWN = 5  # names in a hint: some operators have dozens of overloads


@dataclass(frozen=True, slots=True)
class Entry:
    """One row."""

    operator: str
    runs: Runs
    by: str  # our name for it, else empty


def table(operators: Iterable[str] = COMMON, truth: Truth | None = None) -> list[Entry]:
    """What runs each operator on MPS, with the torch at hand.

    Args:
        operators: aten names with their overload: ``"mm"``, ``"index.Tensor"``. The prefix
            ``aten::``, which torch's own messages carry, may stand before them.
        truth: who answers; by default the best source on this machine.

    Raises:
        ArgumentError: an operator is malformed or unknown to this torch; the message names it, and
            names that exist.
    """
    source = truth or Truth.here()
    return [_entry(_checked(name, source), source) for name in operators]


def _checked(given: str, truth: Truth) -> str:
    """The bare name of an operator that exists."""
    name = given.removeprefix("aten::")
    if not _WELL_FORMED.fullmatch(name):
        raise ArgumentError(
            f"operators: got {given!r}; allowed are aten names such as mm or index.Tensor"
        )
    if truth.knows(name):
        return name
    raise ArgumentError(
        f"operators: got {given!r}; this torch has no aten::{name}; {_hint(name, truth)}"
    )


def _hint(name: str, truth: Truth) -> str:
    """What may have been meant."""
    names = truth.names()
    base = name.partition(".")[0]
    overloads = sorted(each for each in names if each.partition(".")[0] == base)
    if overloads:
        more = f" and {len(overloads) - _SHOWN} more" if len(overloads) > _SHOWN else ""
        return f"its overloads are {', '.join(overloads[:_SHOWN])}{more}"
    near = get_close_matches(name, names, n=_SHOWN)
    return f"near it are {', '.join(near)}" if near else "--all lists every operator"


def _entry(name: str, truth: Truth) -> Entry:
    if truth.has_kernel(name) and name not in OURS:
        return Entry(name, Runs.STOCK, "")
    if name in OURS:
        return Entry(name, Runs.OURS, OURS[name])
    if truth.is_composite(name):
        return Entry(name, Runs.COMPOSITE, "")
    return Entry(name, Runs.NONE, "")
