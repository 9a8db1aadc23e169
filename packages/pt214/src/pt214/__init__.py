"""One install and one command line over the pt214 parts."""

__all__: list[str] = []
