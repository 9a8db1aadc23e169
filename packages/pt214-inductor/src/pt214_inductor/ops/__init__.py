"""Ops of this part, as functions: checked, differentiable, registered with torch.library."""

from pt214_inductor.ops.softmax import softmax

__all__ = ["softmax"]
