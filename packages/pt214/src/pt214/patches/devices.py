"""Requests for CUDA on a machine without it use the accelerator there is, or the CPU.

A script written for a workstation (``model.cuda()``, ``device="cuda"``, ``backend="nccl"``) then
runs on a laptop. One warning says so. Where CUDA is available nothing is replaced.

Covered: ``Tensor.cuda/to``, ``Module.cuda/to``, the factory functions, ``init_process_group``.
``torch.cuda`` itself stays as it is: ``torch.cuda.is_available()`` keeps telling the truth.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pt214.patching import PatchSet

__all__ = ["apply"]

FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_warned = False


def apply(patches: PatchSet) -> str:
    """Replace the calls that name a device, unless CUDA is there."""
    global _warned
    if torch.cuda.is_available():
        return "CUDA is available: devices are left as they are"
    _warned = False
    target = _target()
    for owner in (torch.Tensor, torch.nn.Module):
        patches.set(owner, "cuda", _cuda_method(target))
        patches.set(owner, "to", _moved(owner.to, target))
    for name in FACTORIES:
        patches.set(torch, name, _moved(getattr(torch, name), target))
    if dist.is_available():
        init = _without_nccl(dist.init_process_group, target)
        for module in (dist, distributed_c10d):
            patches.set(module, "init_process_group", init)
    return f"no CUDA device: cuda and nccl mean {target} and gloo, with one warning"


def _target() -> str:
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _is_cuda(value: object) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


def _warn_once(target: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"this machine has no CUDA device: 'cuda' means '{target}' here "
            "(pt214.enable(devices=False) makes it an error again)",
            stacklevel=4,
        )


def _cuda_method(target: str) -> Callable[..., Any]:
    def cuda(self: Any, device: object = None, *args: Any, **kwargs: Any) -> Any:
        """Stand-in for ``.cuda()`` on a machine without CUDA."""
        _warn_once(target)
        return self.to(target)

    return cuda


def _moved(stock: Callable[..., Any], target: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A device travels by keyword, or as the first argument of ``.to`` after self.
        position = next((i for i, value in enumerate(args[:2]) if _is_cuda(value)), None)
        by_name = _is_cuda(kwargs.get("device"))
        if position is None and not by_name:
            return stock(*args, **kwargs)
        _warn_once(target)
        if by_name:
            kwargs["device"] = target
        if position is not None:
            args = (*args[:position], target, *args[position + 1 :])
        return stock(*args, **kwargs)

    return call


def _without_nccl(stock: Callable[..., Any], target: str) -> Callable[..., Any]:
    @functools.wraps(stock)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if backend == "nccl":
            _warn_once(target)
            backend = "gloo"
        if _is_cuda(kwargs.get("device_id")):
            _warn_once(target)
            del kwargs["device_id"]
        return stock(backend, *args, **kwargs)

    return init_process_group
