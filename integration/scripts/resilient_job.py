"""Use ``resilient`` as its author would: initialise, train, save, load. One rank of a job."""

import pt214; pt214.enable()  # the one added line

import sys

import resilient
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

path = sys.argv[1]
resilient.init_group()
torch.manual_seed(dist.get_rank())  # DDP spreads rank 0's weights
model = nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
net = DistributedDataParallel(model)
for epoch in range(3):
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    resilient.save(epoch, model, optimizer, path)

want = {name: value.clone() for name, value in model.state_dict().items()}
moments = optimizer.state[model.weight]["exp_avg"].clone()
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
    optimizer.state[model.weight]["exp_avg"].zero_()
assert resilient.restore(model, optimizer, path) == 2
for name, value in model.state_dict().items():
    assert torch.equal(value, want[name]), name
assert torch.equal(optimizer.state[model.weight]["exp_avg"], moments)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: restored epoch 2")
dist.destroy_process_group()
