"""The toy under ``python -m pt214_elastic run``."""

import pt214_elastic
import recovery_toy as toy
import torch

el = pt214_elastic.init(on_fault="rejoin")
model = toy.make_model()
opt = torch.optim.AdamW(model.parameters())
net = el.wrap_ddp(model)
el.track(model=model, opt=opt)
for step in el.steps(toy.STEPS):
    with step:
        loss = toy.loss_of(net, step.n, el.rank)
        toy.kill_in(step.n, el.rank, el.world_size)
        loss.backward()
        opt.step()
        opt.zero_grad()
    if step.committed:
        toy.note("commit", step.n, el.world_size)
        if step.n + 2 in toy.KILL_AT:
            el.wait_for_world(4, 60)
