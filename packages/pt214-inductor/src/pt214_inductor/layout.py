"""Apply ``policy.layout`` to one lowered graph."""

from __future__ import annotations

from typing import Any

import torch

from pt214_inductor.policy.layout import Convolution, channels_last_wins
from pt214_inductor.record import Decision, record

SETTING = "force_layout_optimization"


def settings(gm: torch.fx.GraphModule, *, inference: bool) -> dict[str, bool]:
    """Inductor settings for this graph's convolutions; empty where stock's rule stands."""
    found = [
        convolution(node)
        for node in gm.graph.nodes
        if node.target is torch.ops.aten.convolution.default
    ]
    if not found:
        return {}
    wins = channels_last_wins(found, inference=inference)
    what = "convolutions in channels_last" if wins else "left: stock's rule decides"
    record(Decision("graph", "layout", what, f"{len(found)} convolutions"))
    return {SETTING: True} if wins else {}


def convolution(node: Any) -> Convolution:
    """Facts of one ``aten.convolution`` node."""
    x, weight, groups = node.args[0].meta["val"], node.args[1].meta["val"], int(node.args[8])
    symbolic = not all(isinstance(size, int) for size in x.shape)
    return Convolution(
        x.device.type, int(weight.shape[1]) * groups, int(weight.shape[0]), groups, symbolic
    )
