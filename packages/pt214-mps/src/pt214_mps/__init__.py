"""Native Metal kernels and honest fallbacks for PyTorch on Apple GPUs."""

__all__: list[str] = []
