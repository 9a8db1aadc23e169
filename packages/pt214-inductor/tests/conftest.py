"""Each test compiles into a cache folder of its own and starts with nothing compiled."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported


@pytest.fixture(autouse=True)
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("inductor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        torch._dynamo.reset()
        torch.manual_seed(0)
        yield folder
        torch._dynamo.reset()


class Feature(nn.Module):
    """Convolution, BatchNorm, GELU, with statistics that are not 0 and 1."""

    def __init__(self, inside: int = 4, outside: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(outside)
        self.act = nn.GELU()
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, inside, H, W] to [N, outside, H, W]."""
        y: torch.Tensor = self.act(self.norm(self.conv(x)))
        return y


@pytest.fixture
def feature() -> Feature:
    return Feature().eval()
