"""A torch.compile backend that decides by measurement what to fuse and what to split."""

__all__: list[str] = []
