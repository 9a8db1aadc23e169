"""Device code and its bare launchers; importing a kernel imports triton."""

__all__: list[str] = []
