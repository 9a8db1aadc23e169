"""The commit vote: one small all-reduce after the gradients, before the optimizer.

    ballot = [step, -step, regroup]     reduced by MAX

Its success proves that every rank had complete gradients of this step, since each votes after its
own were reduced. The two step numbers catch ranks that drifted apart; the third element lets all
agree to regroup at the next boundary.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from pt214_elastic.errors import LoopError
from pt214_elastic.pending import Pending


def cast(step: int, regroup: bool, pending: Pending) -> bool:
    """Vote for ``step``; whether anybody wants to regroup after it.

    Raises:
        LoopError: ranks are in different steps.
        RuntimeError: a rank is lost; from torch.
    """
    on_cuda = dist.get_backend() == "nccl"
    ballot = torch.tensor([step, -step, int(regroup)], device="cuda" if on_cuda else "cpu")
    work = dist.all_reduce(ballot, dist.ReduceOp.MAX, async_op=True)
    highest, lowest, wanted = pending.follow(work, lambda result: result.tolist()).wait()
    if highest != -lowest:
        raise LoopError(f"ranks are in steps {-lowest} to {highest}: this one is in {step}")
    return bool(wanted)
