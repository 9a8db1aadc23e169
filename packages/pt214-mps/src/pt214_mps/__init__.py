"""Native Metal kernels and honest fallbacks for PyTorch on Apple GPUs."""

from pt214_mps.errors import ArgumentError, MPSError, NoMPS
from pt214_mps.ops.rms_norm import rms_norm

__all__ = ["ArgumentError", "MPSError", "NoMPS", "rms_norm"]
