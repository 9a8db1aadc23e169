"""The toy under torchrun: a checkpoint after each step, loaded at the start."""

import os

import recovery_toy as toy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PATH = toy.FOLDER / "checkpoint.pt"

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = toy.make_model()
opt = torch.optim.AdamW(model.parameters())
first = 0
if PATH.exists():
    state = torch.load(PATH)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    first = state["step"] + 1
net = DistributedDataParallel(model)
for step in range(first, toy.STEPS):
    loss = toy.loss_of(net, step, rank)
    toy.kill_in(step, rank, world)
    loss.backward()
    opt.step()
    opt.zero_grad()
    toy.note("commit", step, world)
    if rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step}, f"{PATH}~")
        os.replace(f"{PATH}~", PATH)
dist.destroy_process_group()
