"""Which operators run natively on MPS with the torch at hand, and by whose kernel."""

from pt214_mps.coverage.table import Entry, Runs, table
from pt214_mps.coverage.truth import Truth

__all__ = ["Entry", "Runs", "Truth", "table"]
