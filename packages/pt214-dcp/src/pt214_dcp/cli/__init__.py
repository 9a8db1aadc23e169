"""One module a command; ``__main__`` finds them in ``COMMANDS``."""
