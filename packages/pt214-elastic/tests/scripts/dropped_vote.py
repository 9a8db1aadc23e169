"""Rank 1's collective fails when rank 0 holds complete gradients; nobody dies.

With the vote, rank 0 waits in it and repeats the step; with a vote that is always yes, rank 0 has
applied the step that rank 1 cannot.
"""

import pt214_elastic
import torch
from pt214_elastic import vote
from pt214_elastic.pending import Pending
from torch.distributed.distributed_c10d import _get_default_store

el = pt214_elastic.init(on_fault="shrink")
model = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
net = el.wrap_ddp(model)
el.track(model=model, opt=opt)


def train(until: int, fails_at: int, after: str) -> None:
    """``after``: what rank 0 has done when rank 1's collective fails."""
    failed = False
    for step in el.steps(until):
        with step:
            net(torch.ones(1, 3)).sum().backward()
            store = _get_default_store()
            if el.rank == 0:
                store.set(f"reduced/{step.n}", "")
            elif step.n == fails_at and not failed:
                failed = True
                store.wait([f"{after}/{step.n}"])
                raise RuntimeError("gloo: connection closed by peer")
            opt.step()
            if el.rank == 0:
                store.set(f"applied/{step.n}", "")
            opt.zero_grad()
        if step.committed:
            el.emit("applied", step=step.n)


def always_yes(step: int, regroup: bool, pending: Pending) -> bool:
    return regroup


train(3, fails_at=1, after="reduced")
vote.cast = always_yes  # the saboteur
train(6, fails_at=4, after="applied")
