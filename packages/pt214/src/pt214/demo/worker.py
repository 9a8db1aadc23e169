"""One training rank: the loop a user of pt214-elastic and pt214-dcp writes.

Run as ``python -m pt214.demo.worker PLAN.json`` by the launcher. A process that replaces a lost one
runs the very same lines: ``el.track`` fills its model and optimizer from a peer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pt214_dcp
import pt214_elastic
import torch.distributed as dist

from pt214.demo.model import evaluate, loss_of
from pt214.demo.options import Plan
from pt214.demo.rank import Rank, build, compile_blocks, state_of

__all__ = ["train"]

GLOBAL_BATCH = 24  # divides by 2, 3 and 4 ranks
REJOIN_LIMIT_S = 60.0


def train(plan: Plan) -> None:
    """Train to the end of the plan, through whatever happens to other ranks."""
    rank = build(plan)
    if plan.compile:
        compile_blocks(plan, rank)
    el = pt214_elastic.init(min_ranks=1, on_fault="rejoin")
    net = el.wrap_ddp(rank.model)
    el.track(model=rank.model, optimizer=rank.optimizer)
    el.emit("begin", pid=os.getpid())
    saver = _Saver(plan, rank, el)
    data = el.loader(rank.train, global_batch=GLOBAL_BATCH)
    for step in el.steps(plan.steps):
        if step.n == _back_together(plan):
            el.wait_for_world(plan.ranks, REJOIN_LIMIT_S)
        part_of_loss = 0.0
        with step:
            for x, y, weight in step.batches(data):
                loss = weight * loss_of(net(x.to(plan.device)), y.to(plan.device))
                loss.backward()
                part_of_loss += float(loss.detach())
            rank.optimizer.step()
            rank.optimizer.zero_grad()
        if step.committed:
            el.emit("trained", step=step.n, loss=part_of_loss)
            saver.after(step.n)
    saver.finish()
    el.emit("finish", pid=os.getpid())


def _back_together(plan: Plan) -> int:
    """The step before which the world should be whole again, for the run's last quarter."""
    return plan.steps - plan.steps // 4


class _Saver:
    """Asynchronous checkpoints between steps; a fault abandons a save, the next one is whole."""

    def __init__(self, plan: Plan, rank: Rank, el: Any) -> None:
        self._plan, self._rank, self._el = plan, rank, el
        self._running: tuple[int, int, float, pt214_dcp.SaveHandle] | None = None
        el.on_epoch(lambda *_: self._abandon())

    def after(self, step: int) -> None:
        """Save after every ``plan.every``-th step and after the last."""
        if (step + 1) % self._plan.every and step + 1 != self._plan.steps:
            return
        self._settle()
        loss = evaluate(self._rank.model, *self._rank.held_out)
        state = {"step": step, **state_of(self._rank)}
        path = Path(self._plan.checkpoints) / f"step-{step:06}"
        try:
            handle = pt214_dcp.async_save(state, path)
            self._running = (step, dist.get_world_size(), loss, handle)
        except pt214_dcp.CheckpointError as error:
            self._el.emit("save_failed", step=step, error=str(error))

    def finish(self) -> None:
        """Wait for the last save."""
        self._settle()

    def _settle(self) -> None:
        if self._running is None:
            return
        step, world_size, loss, handle = self._running
        self._running = None
        try:
            handle.wait()
        except pt214_dcp.CheckpointError as error:
            self._el.emit("save_failed", step=step, error=str(error))
            return
        self._el.emit(
            "saved",
            step=step,
            world_size=world_size,
            held_out_loss=loss,
            blocked_s=handle.blocked_s,
            durable_s=handle.durable_s,
            size_bytes=handle.size_bytes,
        )

    def _abandon(self) -> None:
        if self._running is not None and not self._running[3].done():
            self._running[3].cancel()


if __name__ == "__main__":
    train(Plan.read(Path(sys.argv[1])))
