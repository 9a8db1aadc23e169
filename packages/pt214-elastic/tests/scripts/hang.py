"""Ranks that do nothing for long: two hang inside a step, one computes there, one rests outside."""

import ctypes
import os
import time

import pt214_elastic
import torch

PAUSE_S = float(os.environ["PAUSE_S"])  # longer than hang_timeout_s
el = pt214_elastic.init(on_fault="rejoin")
model = torch.nn.Linear(3, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
net = el.wrap_ddp(model)
el.track(model=model, opt=opt)


def compute(until_s: float) -> None:
    while time.monotonic() < until_s:
        torch.randn(64, 64).matmul(torch.randn(64, 64))


for step in el.steps(12):
    with step:
        if (step.n, el.member_id) == (2, 1):
            time.sleep(3600)
        if (step.n, el.member_id) == (5, 3):
            ctypes.PyDLL(None).sleep(3600)  # a C call that keeps the interpreter's lock
        if (step.n, el.member_id) == (8, 0):
            compute(time.monotonic() + PAUSE_S)
        net(torch.ones(1, 3)).sum().backward()
        opt.step()
        opt.zero_grad()
    if step.committed and step.n in (3, 6):
        el.wait_for_world(3, 60)
    if step.committed and (step.n, el.member_id) == (9, 2):
        time.sleep(PAUSE_S)
el.emit("final", values=model.weight.tolist())
