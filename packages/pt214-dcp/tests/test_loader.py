"""What a load does besides filling tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pt214_dcp
import torch
from pt214_dcp.exchange import members
from pt214_dcp.loader import LoadOptions, load_into

COUNT = 300  # tensors: enough objects for many passes at the threshold below


@contextmanager
def passes() -> Iterator[Callable[[], int]]:
    """How often the cyclic collector began within, had it run at every tenth object."""
    begun: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            begun.append(phase)

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(10)
    try:
        yield lambda: len(begun)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)


def collected_in(load: Callable[..., Any], path: Path) -> int:
    state = {f"w{at}": torch.zeros(4) for at in range(COUNT)}
    with passes() as counted:
        load(state, path, members(None), LoadOptions())
        found = counted()
    assert all(bool(torch.all(value == 1)) for value in state.values())
    return found


def test_the_collector_is_held_during_a_load_and_runs_after_it(tmp_path: Path) -> None:
    pt214_dcp.save({f"w{at}": torch.ones(4) for at in range(COUNT)}, tmp_path)
    assert collected_in(load_into, tmp_path) <= 2  # at most as it is let go
    assert gc.isenabled()
    twin = load_into.__wrapped__  # type: ignore[attr-defined]  # without the hold
    assert collected_in(twin, tmp_path) > 20
