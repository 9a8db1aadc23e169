"""Triton kernels for softmax over the last dim, forward: one program per row.

    y[m, n] = exp(x[m, n] - max_n x[m, :]) / sum_n exp(x[m, n] - max_n x[m, :])

Traffic: a row that fits a block is read once and written once, 2 * M * N * itemsize bytes. A longer
row is read twice: the first pass keeps a running maximum and a sum rescaled to it, so that maximum
and sum take one read together; the second pass writes. Bandwidth-bound.
Source: Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867, algorithm 3.
"""

import torch
import triton
import triton.language as tl

# H200, bf16: 8192x16384 takes 137 us in registers; stock's two reads of the row take 287.
MAX_BLOCK = 16384  # elements held by one program
LOOP_BLOCK = 4096  # elements a step of the long-row kernel; not tuned yet


@triton.jit
def _softmax_row(
    y_ptr,  # [M, N] contiguous, dtype of x
    x_ptr,  # [M, N] any float dtype, stride(1) == 1
    x_stride,  # elements between rows of x
    n_cols,
    BLOCK: tl.constexpr,  # power of two, >= n_cols
):
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride can pass 2**31
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=-float("inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))  # masked lanes are exp(-inf) = 0
    y = e / tl.sum(e, axis=0)
    tl.store(y_ptr + row * n_cols + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_loop(
    y_ptr,  # [M, N] contiguous, dtype of x
    x_ptr,  # [M, N] any float dtype, stride(1) == 1
    x_stride,  # elements between rows of x
    n_cols,
    BLOCK: tl.constexpr,  # power of two
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * n_cols
    cols = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -float("inf"), tl.float32)  # running maximum of each lane
    total = tl.zeros([BLOCK], tl.float32)  # sum of exp(x - top) of each lane
    for start in range(0, n_cols, BLOCK):
        mask = start + cols < n_cols
        x = tl.load(x_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, x)
        # A lane that has seen only -inf would compute -inf - -inf = nan: it holds nothing yet.
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = new
    # max drops NaN, the sums keep it: every output of such a row becomes NaN, as in eager.
    peak = tl.max(top, axis=0)
    scale = 1.0 / tl.sum(total * tl.exp(top - peak), axis=0)
    for start in range(0, n_cols, BLOCK):
        mask = start + cols < n_cols
        x = tl.load(x_ptr + start + cols, mask=mask, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - peak) * scale
        tl.store(y_ptr + start + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


def launch_softmax(y: torch.Tensor, x: torch.Tensor) -> None:
    """Fill ``y`` with the softmax of ``x`` over its last dim; both 2-d, ``y`` contiguous."""
    rows, cols = x.shape
    if cols <= MAX_BLOCK:
        block = triton.next_power_of_2(cols)
        warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
        _softmax_row[(rows,)](y, x, x.stride(0), cols, BLOCK=block, num_warps=warps)
    else:
        _softmax_loop[(rows,)](y, x, x.stride(0), cols, BLOCK=LOOP_BLOCK, num_warps=8)
