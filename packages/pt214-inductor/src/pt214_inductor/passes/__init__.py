"""Graph passes; each is one file, found by ``pt214_inductor.scope``."""

__all__: list[str] = []
