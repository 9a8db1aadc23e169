"""What a step may change before it is committed, kept so that a repeat starts where it started.

Parameters and optimizer state need no copy: nothing touches them before the vote, and after it the
step counts. What does change early is small: random number generators, module buffers, gradients
and whatever else is tracked (schedulers, counters), whose ``state_dict`` is copied.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from pt214_elastic.errors import StateError


@runtime_checkable
class Stateful(Protocol):
    """Anything that can give its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state."""
        ...


class Tracked:
    """The named objects that make up the training state."""

    def __init__(self) -> None:
        self.objects: dict[str, Stateful] = {}
        self._arrived: dict[str, Any] = {}

    def add(self, objects: dict[str, Any]) -> None:
        """Track more objects; those whose state arrived from a peer already are filled.

        Raises:
            StateError: an object has no ``state_dict``, or the name is taken by another one.
        """
        for name, item in objects.items():
            if not isinstance(item, Stateful):
                raise StateError(
                    f"track({name}=...): {type(item).__name__} has no state_dict and"
                    " load_state_dict"
                )
            if self.objects.get(name, item) is not item:
                raise StateError(f"track({name}=...): the name is taken by another object")
            self.objects[name] = item
            if name in self._arrived:
                item.load_state_dict(self._arrived.pop(name))

    def gather(self) -> dict[str, Any]:
        """All objects' state, by name."""
        return {name: item.state_dict() for name, item in self.objects.items()}

    def fill(self, states: dict[str, Any]) -> None:
        """Load what a peer sent; what is not tracked yet is kept for :meth:`add`.

        Raises:
            StateError: the peer sent nothing for an object tracked here.
        """
        if missing := sorted(set(self.objects) - set(states)):
            raise StateError(f"the peer's state has no {missing}: it has {sorted(states)}")
        self._arrived = dict(states)
        for name, item in self.objects.items():
            item.load_state_dict(self._arrived.pop(name))

    def modules(self) -> Iterator[nn.Module]:
        """The tracked modules."""
        return (item for item in self.objects.values() if isinstance(item, nn.Module))

    def optimizers(self) -> Iterator[Optimizer]:
        """The tracked optimizers."""
        return (item for item in self.objects.values() if isinstance(item, Optimizer))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Each parameter of a tracked module or optimizer once."""
        seen: set[int] = set()
        of_modules = (p for module in self.modules() for p in module.parameters())
        groups = (group for opt in self.optimizers() for group in opt.param_groups)
        for parameter in (*of_modules, *(p for group in groups for p in group["params"])):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def snapshot(tracked: Tracked) -> Callable[[], None]:
    """Note everything a step may change before its vote; the returned call puts it back."""
    undo = [_random_state(), *map(_buffers, tracked.modules()), _gradients(tracked)]
    for item in tracked.objects.values():
        if isinstance(item, Optimizer):
            undo.append(_hyperparameters(item))
        elif not isinstance(item, nn.Module):
            undo.append(_whole(item))

    def restore() -> None:
        for call in undo:
            call()

    return restore


def _random_state() -> Callable[[], None]:
    own, cpu = random.getstate(), torch.get_rng_state()
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if on_cuda else []

    def restore() -> None:
        random.setstate(own)
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore


def _buffers(module: nn.Module) -> Callable[[], None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    def restore() -> None:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)

    return restore


def _gradients(tracked: Tracked) -> Callable[[], None]:
    kept = [
        (parameter, None if parameter.grad is None else parameter.grad.clone())
        for parameter in tracked.parameters()
    ]

    def restore() -> None:
        for parameter, value in kept:
            parameter.grad = value if value is None else value.clone()

    return restore


def _hyperparameters(optimizer: Optimizer) -> Callable[[], None]:
    kept = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        for group, values in zip(optimizer.param_groups, kept, strict=True):
            group.update(values)

    return restore


def _whole(item: Stateful) -> Callable[[], None]:
    kept = copy.deepcopy(item.state_dict())

    def restore() -> None:
        item.load_state_dict(copy.deepcopy(kept))

    return restore
