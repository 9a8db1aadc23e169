"""Softmax over one dim: checks, registration, gradient, and the definition in plain PyTorch.

    forward    y = exp(x - max x) / sum exp(x - max x)
    backward   dx = y * (dy - sum(dy * y))

Triton serves CUDA tensors (and any tensor under its interpreter); the definition serves the rest.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch

from pt214_inductor.errors import ShapeError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Exponentials of ``x`` scaled to sum 1 along ``dim``.

    Args:
        x: any shape with at least one dim; float16, bfloat16 or float32.
        dim: from ``-x.dim()`` to ``x.dim() - 1``. The last dim is read in place, another one is
            copied to the end first.

    Returns:
        Shape, dtype and device of ``x``; maxima and sums are float32.

    Raises:
        ShapeError: ``x`` has no dim, a dtype that is not listed, or ``dim`` is out of range.

    Source: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867.

    >>> softmax(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    if x.dtype not in DTYPES:
        raise ShapeError(f"x: got {x.dtype}, allowed are float16, bfloat16 and float32")
    if x.dim() == 0:
        raise ShapeError("x: got 0 dims, softmax needs at least 1")
    if not -x.dim() <= dim < x.dim():
        raise ShapeError(f"dim: got {dim}, allowed are {-x.dim()} to {x.dim() - 1}")
    moved = x.movedim(dim, -1)
    y: torch.Tensor = torch.ops.pt214_inductor.softmax(moved)
    return y.movedim(-1, dim)


def reference(x: torch.Tensor) -> torch.Tensor:
    """The definition, over the last dim."""
    wide = x.float()
    e = (wide - wide.amax(-1, keepdim=True)).exp() if x.numel() else wide
    y: torch.Tensor = e / e.sum(-1, keepdim=True)
    return y.to(x.dtype)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"  # triton's own switch, read by triton too


@torch.library.custom_op("pt214_inductor::softmax", mutates_args=())
def _softmax(x: torch.Tensor) -> torch.Tensor:
    kernel_serves = (x.is_cuda or _interpreted()) and find_spec("triton") is not None
    if not kernel_serves or x.numel() == 0:
        return reference(x).contiguous()
    from pt214_inductor.kernels.softmax import launch_softmax

    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    y = torch.empty_like(rows, memory_format=torch.contiguous_format)
    launch_softmax(y, rows)
    return y.view(x.shape)


@_softmax.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
    (y,) = ctx.saved_tensors
    wide, grad = y.float(), dy.float()
    dx: torch.Tensor = wide * (grad - (grad * wide).sum(-1, keepdim=True))
    return dx.to(y.dtype)


_softmax.register_autograd(_backward, setup_context=_setup_context)
