"""The shape of torch's DDP tutorial: nothing of this package is imported."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Linear(10, 5))
    opt = torch.optim.SGD(model.parameters(), lr=0.001)
    opt.zero_grad()
    nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
    opt.step()
    total = torch.tensor([float(os.environ["LOCAL_RANK"])])
    dist.all_reduce(total)
    sys.stdout.write(f"rank {rank} of {dist.get_world_size()} sum {total.item()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
