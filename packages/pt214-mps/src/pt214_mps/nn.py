"""Drop-in modules over ``pt214_mps.ops``."""

from __future__ import annotations

import torch
from torch import nn

from pt214_mps.ops.rms_norm import DTYPES, rms_norm

__all__ = ["RMSNorm"]


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` whose forward and backward are one Metal kernel each on ``mps``.

    Same arguments, parameters and state dict. What the kernel does not serve (another device,
    several normalized dims, no weight, mixed dtypes under autocast) is torch's own.

    >>> RMSNorm(2)(torch.tensor([[3.0, 4.0]])).round(decimals=3).tolist()
    [[0.849, 1.131]]
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize ``x`` [..., N] over its last dim."""
        if not self.serves(x):
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return rms_norm(x, self.weight, eps)

    def serves(self, x: torch.Tensor) -> bool:
        """Whether the kernel takes ``x``; elsewhere a compiler fuses torch's own form better."""
        return (
            x.device.type == "mps"
            and len(self.normalized_shape) == 1
            and self.weight is not None
            and self.weight.dtype == x.dtype
            and x.dtype in DTYPES
        )
