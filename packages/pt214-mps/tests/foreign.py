"""Models that nobody here wrote: what ``check`` must be able to judge, forward and backward.

The list was fixed before ``check`` was first run over it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

X1, X2, X3 = (4, 8, 16), (2, 4, 12, 12), (2, 4, 6, 6, 6)
Model = tuple[Callable[[], nn.Module], tuple[int, ...]]

MODELS: dict[str, Model] = {
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 2, 32), X1),
    "TransformerEncoderLayer norm_first": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, activation="gelu"),
        X1,
    ),
    "LSTM": (lambda: nn.LSTM(16, 8, num_layers=2, bidirectional=True), X1),
    "GRU": (lambda: nn.GRU(16, 8), X1),
    "Conv1d": (lambda: nn.Conv1d(8, 4, 3, dilation=2), X1),
    "Conv2d": (lambda: nn.Conv2d(4, 8, 3, groups=2), X2),
    "Conv3d": (lambda: nn.Conv3d(4, 8, 3), X3),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), X2),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), X2),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), X2),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), X2),
    "LayerNorm": (lambda: nn.LayerNorm(16), X1),
    "RMSNorm": (lambda: nn.RMSNorm(16), X1),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), X2),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), X2),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), X3),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), X3),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(3), X3),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(3), X2),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(3, output_size=4), X2),
    "LPPool2d": (lambda: nn.LPPool2d(2, 3), X2),
    "Upsample bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), X2),
    "Upsample bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), X2),
    "Upsample trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), X3),
    "ReflectionPad3d": (lambda: nn.ReflectionPad3d(1), X3),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), X2),
    "Fold and Unfold": (lambda: nn.Sequential(nn.Unfold(3), nn.Fold((12, 12), 3)), X2),
    "activations": (
        lambda: nn.Sequential(
            nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.CELU(), nn.Hardswish(), nn.Hardshrink(),
            nn.Softshrink(), nn.RReLU(), nn.PReLU(), nn.GLU(), nn.Softplus(), nn.LogSigmoid(),
        ),
        X1,
    ),
    "dropouts": (lambda: nn.Sequential(nn.Dropout(), nn.AlphaDropout(), nn.Dropout2d()), X2),
}  # fmt: skip
OPTIMIZERS = ("SGD", "AdamW", "Adafactor", "LBFGS", "NAdam", "RMSprop", "Rprop")
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "svd": lambda x: torch.linalg.svd(x)[1],
    "qr": lambda x: torch.linalg.qr(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x @ x.mT)[0],
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 32 * torch.eye(8)),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "stft": lambda x: torch.stft(x[0], 16, return_complex=True).abs(),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "sort": lambda x: x.sort().values.cumprod(-1),
    "median": lambda x: x.median(-1).values + x.quantile(0.3, -1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "grid_sample": lambda x: nn.functional.grid_sample(x[None], x[None, :, :8, :2].tanh()),
    "ctc_loss": lambda x: nn.functional.ctc_loss(
        x.log_softmax(-1).mT, torch.ones(16, 2, dtype=torch.long), [8] * 16, [2] * 16
    )
    if x.shape[0] == 8
    else x,
    "special": lambda x: torch.special.i0e(x) + torch.lgamma(x.abs() + 1) + torch.erfinv(x.tanh()),
}
