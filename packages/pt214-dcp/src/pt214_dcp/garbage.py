"""Python's cyclic collector, held while very many small objects are made and none is garbage.

Each of its full passes looks at every object of the process; with 20,000 tensors to plan it would
make several, for nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold the collector; if the caller holds it already, leave it so."""
    held = not gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not held:
            gc.enable()
