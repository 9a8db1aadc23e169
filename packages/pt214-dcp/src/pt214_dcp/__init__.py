"""Asynchronous, crash-safe distributed checkpoints."""

__all__: list[str] = []
