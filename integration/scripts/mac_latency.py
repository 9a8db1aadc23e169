"""A transformer layer timed on whatever device there is, with torch.mps calls of a Mac's script."""

import pt214; pt214.enable()  # the one added line

import time

import torch
from torch import nn

torch.mps.set_per_process_memory_fraction(0.85)
device = torch.device("mps" if torch.backends.mps.is_available() else "cpu")
print("device", device)

layer = nn.TransformerEncoderLayer(d_model=512, nhead=8, batch_first=True).to(device)
x = torch.randn(4, 32, 512, device=device)
for _ in range(2):
    layer(x)
torch.mps.synchronize()
start = time.perf_counter()
for _ in range(3):
    out = layer(x)
    torch.mps.synchronize()
print("shape", tuple(out.shape))
print("positive", (time.perf_counter() - start) > 0)
