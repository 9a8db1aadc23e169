"""Pure decisions: numbers in, a verdict with its reason out; no torch graph, no device."""

__all__: list[str] = []
