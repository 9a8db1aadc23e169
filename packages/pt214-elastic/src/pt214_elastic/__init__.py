"""Training that survives lost ranks without restarting a process."""

__all__: list[str] = []
