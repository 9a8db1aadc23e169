"""Copy while forward and backward run: what only an optimizer's step changes can wait for it.

Parameters and optimizer state change in ``step`` alone, so their copy may go on after the call has
returned, if the next ``step`` waits for it. Everything else (buffers, which forward changes, EMA
weights, what other code owns) is copied before. That nobody changed a tensor meanwhile is checked
by torch's version counters; a torn copy fails the save.

Source of the idea: DataStates-LLM, https://arxiv.org/abs/2406.10707.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pt214_dcp.compat import local_tensor
from pt214_dcp.errors import SaveFailed
from pt214_dcp.file_plan import FilePlan


@dataclass(slots=True)
class Guard:
    """Tensors that only ``optimizers`` change, and their versions.

    Attributes:
        optimizers: whose steps wait.
        parts: numbers of the parts of the plan that are guarded.
        watched: those tensors, with the version that each had.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    parts: frozenset[int]
    watched: list[tuple[torch.Tensor, int]]

    def hold(self, copy: Callable[[], None]) -> Callable[[], None]:
        """Run ``copy`` in a thread; the optimizers' next step waits for it.

        Returns:
            A function that waits until the copy is made.
        """
        done = threading.Event()
        hooks: list[Any] = []

        def run() -> None:
            try:
                copy()
            finally:
                done.set()
                for hook in hooks:
                    hook.remove()

        def wait(*_: Any) -> None:
            done.wait()

        hooks += [optimizer.register_step_pre_hook(wait) for optimizer in self.optimizers]
        threading.Thread(target=run, name="pt214_dcp copy").start()
        return wait

    def check(self) -> None:
        """After the copy: raise SaveFailed if a tensor was changed meanwhile."""
        for tensor, version in self.watched:
            if tensor._version != version:
                raise SaveFailed(
                    f"a tensor of shape {tuple(tensor.shape)} was changed outside its optimizer's "
                    "step while it was copied; leave overlap out, or change it after wait_staged()"
                )


def guard_of(
    optimizers: tuple[torch.optim.Optimizer, ...],
    plan: FilePlan,
    tensors: Sequence[torch.Tensor],
) -> Guard:
    """Find the parts of the plan whose memory belongs to the optimizers."""
    owned: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            owned.update(_address(param) for param in group["params"])
        for state in optimizer.state.values():
            owned.update(_address(v) for v in state.values() if isinstance(v, torch.Tensor))
    owned.discard(0)
    guarded = {at for at, tensor in enumerate(tensors) if _address(tensor) in owned}
    parts = frozenset(n for n, part in enumerate(plan.parts) if part.tensor in guarded)
    locals_ = [local_tensor(tensors[at]) for at in sorted(guarded)]
    watched = [(tensor, tensor._version) for tensor in locals_]
    return Guard(optimizers, parts, watched)


def _address(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.untyped_storage().data_ptr() if local.numel() else 0
