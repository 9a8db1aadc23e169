"""RMSNorm: checks, registration, gradient, and the definition in plain PyTorch.

    forward    rstd = (mean_n x^2 + eps)^-1/2        y = x * rstd * w
    backward   dx = rstd * (w * dy - x * rstd^2 * mean_n(w * dy * x))
               dw = sum_m dy * x * rstd

The Metal kernel serves tensors on ``mps``, the definition every other device. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import torch

from pt214_mps.errors import ArgumentError, NoMPS
from pt214_mps.kernels import rms_norm as kernels
from pt214_mps.kernels.shaders import available

__all__ = ["reference", "rms_norm"]

DTYPES = tuple(kernels.SUFFIX)
MAX_COLS = 65_536  # what the kernel's lanes were laid out for; not a limit of Metal
MAX_EPS = torch.finfo(torch.float32).max  # the kernel takes eps as a float32


def rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``w``.

    Args:
        x: ``[..., N]``, float16, bfloat16 or float32; N from 1 to 65536.
        w: ``[N]``, dtype and device of ``x``.
        eps: added to the mean square, in units of ``x**2``; 0 or more, finite in float32.

    Returns:
        ``[..., N]``, dtype and device of ``x``; sums are float32.

    Raises:
        ArgumentError: a type, layout, dtype, shape, device or ``eps`` does not fit; the message
            tells which.
        NoMPS: the tensors say ``mps`` where there is none.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467, eq. 4.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2))
    tensor([[0.8485, 1.1314]])
    """
    _check(x, w, eps)
    y, _ = torch.ops.pt214_mps.rms_norm(x, w, eps)
    result: torch.Tensor = y
    return result


def reference(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: ``y`` [..., N] in the dtype of ``x``, and ``rstd`` [...] in float32."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd.unsqueeze(-1) * w.float()).to(x.dtype), rstd


def _check(x: torch.Tensor, w: torch.Tensor, eps: float) -> None:
    for name, tensor in (("x", x), ("w", w)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{name}: got {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.layout != torch.strided:
            raise ArgumentError(f"{name}: got layout {tensor.layout}; allowed is torch.strided")
    if x.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"x: got {x.dtype}; allowed are {allowed}")
    if x.dim() == 0 or not 1 <= x.shape[-1] <= MAX_COLS:
        shape = tuple(x.shape)
        raise ArgumentError(f"x: got shape {shape}; the last dim must be from 1 to {MAX_COLS}")
    if w.shape != x.shape[-1:]:
        raise ArgumentError(f"w: got shape {tuple(w.shape)}; x needs {tuple(x.shape[-1:])}")
    if w.dtype != x.dtype:
        raise ArgumentError(f"w: got {w.dtype}; x has {x.dtype}")
    if w.device != x.device:
        raise ArgumentError(f"w: is on {w.device}; x is on {x.device}")
    if isinstance(eps, bool) or not isinstance(eps, (float, int, torch.SymFloat)):
        raise ArgumentError(f"eps: got {type(eps).__name__}; it must be a float or an int")
    if not 0 <= eps <= MAX_EPS:  # False for NaN, too
        raise ArgumentError(
            f"eps: got {eps}; it must be from 0 to {MAX_EPS:.7g}, float32's largest"
        )


@torch.library.custom_op("pt214_mps::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y, rstd = reference(x.contiguous(), w, eps)  # strides must not change the order of a sum
    return y, rstd


@_rms_norm.register_kernel("mps")
def _rms_norm_mps(
    x: torch.Tensor, w: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    _need_mps()
    rows = x.contiguous().view(-1, x.shape[-1])
    y = torch.empty_like(rows)
    rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
    if rows.shape[0]:  # Metal refuses an empty grid
        kernels.forward(y, rstd, rows, w.contiguous(), eps)
    return y.view(x.shape), rstd.view(x.shape[:-1])


@_rms_norm.register_fake
def _(x: torch.Tensor, w: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("pt214_mps::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rstd.unsqueeze(-1)
    wide, weighted = x.float(), dy.float() * w.float()
    along = (weighted * wide).mean(-1, keepdim=True) * scale.square()
    dx = scale * (weighted - wide * along)
    return dx.to(x.dtype).contiguous(), _dw(dy, x, w, rstd)


@_rms_norm_backward.register_kernel("mps")
def _rms_norm_backward_mps(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    _need_mps()
    rows = x.contiguous().view(-1, x.shape[-1])
    dx = torch.empty_like(rows)
    if rows.shape[0]:
        kernels.backward(
            dx, dy.contiguous().view(rows.shape), rows, w.contiguous(), rstd.contiguous().view(-1)
        )
    return dx.view(x.shape), _dw(dy, x, w, rstd)


@_rms_norm_backward.register_fake
def _(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(w)


def _dw(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Gradient of the weight: a reduction over rows, which stock torch has natively on MPS."""
    product = dy.float() * x.float() * rstd.unsqueeze(-1)
    return product.reshape(-1, x.shape[-1]).sum(0).to(w.dtype)


def _need_mps() -> None:
    if not available():
        raise NoMPS(
            "x: is on mps, but torch.backends.mps.is_available() is False in this process; "
            "move it to the CPU, or run on macOS 14 or newer with an Apple GPU"
        )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, w, _ = inputs
    ctx.save_for_backward(x, w, output[1])
    # rstd is an output only so that backward may reuse it: it carries no gradient.
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, dy: torch.Tensor, _drstd: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, w, rstd = ctx.saved_tensors
    dx, dw = torch.ops.pt214_mps.rms_norm_backward(dy, x, w, rstd)
    return dx, dw, None


_rms_norm.register_autograd(_backward, setup_context=_save)
