"""DistributedDataParallel behind a stable proxy, wrapped anew in each epoch.

A DDP wrapper that lived through a fault is silently wrong in its next step: the reducer keeps the
division factor of the world it started the broken iteration with. A new wrapper costs 4-5 ms.

Gradients are summed, not averaged: the weights of ``step.batches`` add up to 1 over the global
batch, for any number of ranks. A loop without ``step.batches`` gets the mean over ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from pt214_elastic.pending import Pending


class ElasticDDP(nn.Module):
    """What ``wrap_ddp`` returns: calls the wrapper of the current epoch.

    Its ``state_dict`` is DDP's (names start with ``module.``); track the plain module instead.
    """

    def __init__(self, module: nn.Module, pending: Pending, **ddp_kwargs: Any) -> None:
        super().__init__()
        self._pending = pending
        self.module = module
        self._kwargs = ddp_kwargs
        self.__dict__["_inner"] = None  # not a submodule: parameters must be listed once
        self.divisor = 1.0

    def rebuild(self) -> None:
        """Wrap the module for the current group; no collective runs."""
        old: DistributedDataParallel | None = self.__dict__["_inner"]
        if old is not None:
            # Else the old reducer's hooks would live on until the garbage collector comes.
            old.reducer._remove_autograd_hooks()
            self.__dict__["_inner"] = None
        inner = DistributedDataParallel(self.module, init_sync=False, **self._kwargs)
        # A lambda: torch compares a hook's annotations by identity, and ours are strings.
        inner.register_comm_hook(None, lambda _state, bucket: self._sum(bucket))
        self.__dict__["_inner"] = inner

    def synchronise(self, source: int) -> None:
        """Copy parameters and buffers of rank ``source`` to all, as DDP's constructor would."""
        with torch.no_grad():
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                dist.broadcast(tensor.detach(), source)

    def set_last_pass(self, last: bool) -> None:
        """Reduce gradients in this pass, or only accumulate them (DDP's ``no_sync``)."""
        if (inner := self.__dict__["_inner"]) is not None:
            inner.require_backward_grad_sync = last

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, with gradients reduced in backward."""
        inner = self.__dict__["_inner"]
        return self.module(*args, **kwargs) if inner is None else inner(*args, **kwargs)

    def _sum(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        divisor = self.divisor

        def scale(total: torch.Tensor) -> torch.Tensor:
            return total if divisor == 1.0 else total.div_(divisor)

        return self._pending.follow(work, scale)
