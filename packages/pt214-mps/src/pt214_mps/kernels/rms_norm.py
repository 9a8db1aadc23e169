"""Launchers of ``rms_norm.metal``: which kernel, how many threads, in which order the arguments go.

One threadgroup per row. Arguments are as the caller checked them: contiguous, on ``mps``, one
dtype. torch binds a Python int as int64 and a float as float32, as the kernels declare them.
"""

from __future__ import annotations

import torch

from pt214_mps.kernels.shaders import library

__all__ = ["SUFFIX", "backward", "forward", "lanes_for"]

SUFFIX = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
SIMD = 32  # lanes of a simdgroup on every Apple GPU
MAX_LANES = 1024  # of a threadgroup, Metal's limit
COLS_PER_LANE = 4  # elements a lane handles before another simdgroup joins; not tuned yet


def lanes_for(cols: int) -> int:
    """Threads of one row's threadgroup: a multiple of 32 from 32 to 1024.

    >>> lanes_for(1), lanes_for(129), lanes_for(65_536)
    (32, 64, 1024)
    """
    wanted = -(-cols // (COLS_PER_LANE * SIMD)) * SIMD
    return max(SIMD, min(MAX_LANES, wanted))


def forward(
    y: torch.Tensor, rstd: torch.Tensor, x: torch.Tensor, w: torch.Tensor, eps: float
) -> None:
    """Write ``y`` [M, N] and ``rstd`` [M] float32 from ``x`` [M, N] and ``w`` [N]."""
    rows, cols = x.shape
    lanes = lanes_for(cols)
    kernel = getattr(library("rms_norm"), f"rms_norm_forward_{SUFFIX[x.dtype]}")
    kernel(y, rstd, x, w, cols, eps, threads=rows * lanes, group_size=lanes)


def backward(
    dx: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> None:
    """Write ``dx`` [M, N] from ``dy`` and ``x`` [M, N], ``w`` [N] and the forward's ``rstd``."""
    rows, cols = x.shape
    lanes = lanes_for(cols)
    kernel = getattr(library("rms_norm"), f"rms_norm_backward_{SUFFIX[x.dtype]}")
    kernel(dx, dy, x, w, rstd, cols, threads=rows * lanes, group_size=lanes)
