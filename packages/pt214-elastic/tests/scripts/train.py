"""A worker that trains a small model and harms itself where the plan in FAULTS says."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import pt214_elastic
import torch
import torch.distributed as dist
from pt214_elastic.ddp import ElasticDDP
from torch import nn

STEPS = int(os.environ["STEPS"])
# [[step, member, phase, what], ...]; phase: forward, vote, after; what: a signal or "error"
FAULTS = json.loads(os.environ["FAULTS"])
WAIT_AFTER = set(json.loads(os.environ["WAIT_AFTER"]))
MIN_RANKS = int(os.environ["MIN_RANKS"])
BOMB = int(os.environ.get("BOMB", "-1"))  # this member dies while the step of others is rolled back


class Bomb:
    """A tracked object; its rollback in the wrong hands is a fault during recovery."""

    armed = False

    def state_dict(self) -> dict[str, Any]:
        return {"n": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.armed:
            os.kill(os.getpid(), signal.SIGKILL)


def harm(step: int, phase: str) -> None:
    if [step, el.member_id, phase] in [fault[:3] for fault in FAULTS]:
        what = next(fault[3] for fault in FAULTS if fault[:3] == [step, el.member_id, phase])
        if what == "error":
            raise ValueError("a mistake in the user's code")
        os.kill(os.getpid(), getattr(signal, what))


def digest() -> str:
    return "".join(
        p.detach().reshape(-1).view(torch.int32).sum().item().__str__() + ","
        for p in model.parameters()
    )  # noqa: E501, RUF100


def train(until: int) -> None:
    for step in el.steps(until):
        with step:
            for x, y, weight in step.batches(data):
                loss = weight * nn.functional.mse_loss(net(x), y)
                harm(step.n, "forward")
                loss.backward()
            passes = data.passes(step.n, el.world_size, el.rank)
            mine = [sample for item in passes if item.weight for sample in item.samples]
            el.emit("dealt", step=step.n, samples=mine)
            harm(step.n, "vote")
            opt.step()
            harm(step.n, "after")
            opt.zero_grad()
        if step.committed:
            el.emit("seen", step=step.n, digest=digest())
            if step.n in WAIT_AFTER:
                bomb.armed = step.n == max(w for w in WAIT_AFTER if w < 20) and el.member_id == BOMB
                el.wait_for_world(4, 60)


def make_torch_old() -> None:
    """As before 2.14: nothing can be reconfigured."""
    for name in ("_reconfigure", "_get_reconfigure_handle"):
        if hasattr(dist, name):
            delattr(dist, name)


def make_reconfigure_fail() -> None:
    """On member 1, in each epoch but the first: only there, so that ranks could disagree."""
    real = vars(dist)["_reconfigure"]

    def failing(uuid: int, **kwargs: Any) -> Any:
        if uuid > 1 and el.member_id == 1:
            raise TypeError("a later torch calls this otherwise")
        return real(uuid=uuid, **kwargs)

    vars(dist)["_reconfigure"] = failing


if os.environ.get("TORCH") == "old":
    make_torch_old()
if os.environ.get("TORCH") == "failing":
    make_reconfigure_fail()
torch.manual_seed(int(os.environ["RANK"]))  # ranks start apart; rank 0's model must win
el = pt214_elastic.init(min_ranks=MIN_RANKS, on_fault="rejoin")
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
bomb = Bomb()
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(50, 4, generator=generator)
targets = inputs.sum(1, keepdim=True)
net = el.wrap_ddp(model)
el.track(model=model, opt=opt, bomb=bomb)
data = el.loader([(inputs[i], targets[i]) for i in range(50)], global_batch=10, micro_batch=2)

train(STEPS)
values = [p.detach().reshape(-1).tolist() for p in model.parameters()]
el.emit("final", values=values, digest=digest(), rank=el.rank, world=el.world_size)
if "SABOTEURS" not in os.environ:
    sys.exit()

# Saboteurs: each must be seen by the checks that the run above has passed.
real_sum = ElasticDDP._sum


def no_sum(self: ElasticDDP, bucket: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


ElasticDDP._sum = no_sum  # type: ignore[method-assign]
train(STEPS + 2)
el.emit("no_all_reduce", digest=digest())
ElasticDDP._sum = real_sum  # type: ignore[method-assign]
pt214_elastic.set_option("on_fault", "shrink")  # a replacement would train from the top
if el.rank == 1:
    el.seat.committed += 1
try:
    train(STEPS + 5)
except pt214_elastic.LoopError as error:
    el.emit("skipped_step", error=str(error))
