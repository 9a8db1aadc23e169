"""A torch.compile backend that decides by measurement what to fuse and what to split."""

from pt214_inductor import ops
from pt214_inductor.compare import Comparison, explain

__all__ = ["Comparison", "explain", "ops"]
