"""A small byte-level GPT: pre-norm blocks, causal attention, tied embedding.

    logits = E^T norm(block_L(... block_1(E[x] + P)))

Source: Radford et al. 2019 (GPT-2), with RMSNorm for LayerNorm.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from pt214.demo.text import CONTEXT

__all__ = ["GPT", "evaluate", "loss_of"]

VOCAB, DIM, HEADS, LAYERS = 256, 128, 4, 4


class Block(nn.Module):
    """One transformer block over [B, L, DIM]."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = norm(DIM), norm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend, then transform each position by itself."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, HEADS, DIM // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        hidden: torch.Tensor = self.down(F.gelu(self.up(self.norm_mlp(x))))
        return x + hidden


class GPT(nn.Module):
    """Bytes [B, L] int64 to logits [B, L, 256]."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(torch.zeros(CONTEXT, DIM))
        self.blocks = nn.ModuleList(Block(norm) for _ in range(LAYERS))
        self.norm = norm(DIM)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the byte after each byte of ``x``."""
        h = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits: torch.Tensor = self.norm(h) @ self.embed.weight.T
        return logits


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats a byte; logits [B, L, 256], y [B, L]."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


@torch.no_grad()
def evaluate(model: GPT, x: torch.Tensor, y: torch.Tensor) -> float:
    """Loss of fixed windows, run eagerly so that every process computes the same numbers."""
    with torch.compiler.set_stance("force_eager"):
        return float(loss_of(model(x), y))
