"""A convolution, a norm and an activation, compiled with dynamic shapes, on a CUDA machine's script.

The kind of script that pt214.enable() is for: written for stock torch and for a workstation.
"""

import pt214; pt214.enable()  # the one added line

import torch
from torch import nn


class Features(nn.Module):
    """[N, 64, H, W] to [N, 128, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 128, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(128)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One stage of a feature extractor."""
        return self.act(self.norm(self.conv(x)))


model = Features().cuda()
images = torch.randn(2, 64, 32, 32, device="cuda")
compiled = torch.compile(model, mode="max-autotune", fullgraph=False, dynamic=True)
output = compiled(images)
print("shape", tuple(output.shape))
torch.testing.assert_close(output, model(images), rtol=2e-3, atol=2e-3)
print("shape", tuple(compiled(torch.randn(1, 64, 24, 40, device="cuda")).shape))
