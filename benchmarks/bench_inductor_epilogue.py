"""Conv2d + BatchNorm2d + GELU in eval, and softmax: eager, stock inductor and pt214 in one run.

Each round times every candidate in turn, so that a slow spell of the machine meets them all; stock
is timed twice, as ``stock`` and ``again``, and ``spread`` is how far those two medians lie apart:
a ratio closer to 1 than that says nothing. Times are CUDA-event medians of one call, in
microseconds, over ``ROUNDS`` rounds of ``CALLS`` calls each.

Run with ``pytest benchmarks/bench_inductor_epilogue.py`` on a CUDA machine; it writes
``benchmarks/results/inductor_epilogue-<machine>.json``.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pt214_inductor import ops
from pt214_inductor.backend import compile_fx
from torch import nn

ROUNDS = 9
CALLS = 20
RESOLUTIONS = [
    (16, 128, 128),
    (8, 96, 160),
    (4, 224, 224),
    (1, 256, 256),
    (3, 101, 77),
    (32, 56, 56),
]
ROWS = [(32768, 1024), (32768, 4096), (8192, 8192), (8192, 16384), (8192, 128256)]
Candidates = dict[str, Callable[[], Any]]
Row = dict[str, Any]


class Feature(nn.Module):
    """The block that the questions are about."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 128, 3, padding=1)
        self.norm = nn.BatchNorm2d(128)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 64, H, W] to [N, 128, H, W]."""
        return self.act(self.norm(self.conv(x)))


def time_us(call: Callable[[], Any]) -> float:
    """Mean of ``CALLS`` calls between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1000 / CALLS


def graphed(call: Callable[[], Any]) -> Callable[[], Any]:
    """Replay as a CUDA graph: kernel time without the host's."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def medians(candidates: Candidates) -> dict[str, float]:
    """Median of each candidate over interleaved rounds."""
    replays = {name: graphed(call) for name, call in candidates.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(time_us(replay))
    return {name: statistics.median(each) for name, each in times.items()}


def rows(case: str, candidates: Candidates) -> list[Row]:
    """One row for each rival of ours."""
    found = medians(candidates)
    spread = abs(found["stock"] / found["again"] - 1)
    return [
        {
            "case": case, "unit": "us", "ours": found["ours"], "rival": found[rival],
            "rival_name": rival, "ratio": found[rival] / found["ours"], "spread": spread,
        }
        for rival in found if rival not in ("ours", "again")
    ]  # fmt: skip


def epilogue_rows() -> list[Row]:
    """Every candidate compiles the same ``forward``: the default limit of 8 would end in eager."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    model = Feature().cuda().eval().bfloat16()
    norm: nn.Module = nn.Sequential(model.norm, model.act)
    found: list[Row] = []
    for name, module, channels in (("conv+bn+gelu", model, 64), ("bn+gelu", norm, 128)):
        for layout in (torch.contiguous_format, torch.channels_last):
            stock = torch.compile(module, dynamic=True)
            ours = torch.compile(module, backend=compile_fx, dynamic=True)
            static = torch.compile(module, dynamic=False)
            for n, h, w in RESOLUTIONS:
                x = torch.randn(n, channels, h, w, device="cuda", dtype=torch.bfloat16)
                x = x.to(memory_format=layout)
                case = f"{name} {n}x{h}x{w} {str(layout).removeprefix('torch.')}"
                calls = {"eager": module, "stock": stock, "static": static, "again": stock}
                found += rows(case, {k: (lambda f=f, x=x: f(x)) for k, f in calls.items()}
                              | {"ours": lambda f=ours, x=x: f(x)})  # fmt: skip
            torch._dynamo.reset()
    return found


def softmax_rows() -> list[Row]:
    """Our op, and ``torch.softmax`` compiled by our backend, against eager and stock."""
    found: list[Row] = []
    for shape in ROWS:
        torch._dynamo.reset()
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        stock = torch.compile(lambda x: torch.softmax(x, -1))
        through = torch.compile(lambda x: torch.softmax(x, -1), backend=compile_fx)
        calls = {"eager": lambda x: torch.softmax(x, -1), "stock": stock, "again": stock}
        pairs = (("softmax op", ops.softmax), ("softmax compiled", through))
        for name, ours in pairs:
            candidates = {k: (lambda f=f, x=x: f(x)) for k, f in {**calls, "ours": ours}.items()}
            found += rows(f"{name} {shape[0]}x{shape[1]}", candidates)
    return found


def report(found: list[Row]) -> Path:
    """Write the JSON that the report is made from."""
    import triton

    gpu = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    result = {
        "question": "inductor_epilogue",
        "machine": {"gpu": gpu, "python": platform.python_version()},
        "versions": versions,
        "rounds": ROUNDS,
        "rows": found,
    }
    place = Path(__file__).parent / "results" / f"inductor_epilogue-{gpu.replace(' ', '-')}.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(result, indent=1) + "\n")
    return place


@pytest.mark.cuda
@torch.no_grad()
def test_epilogue(benchmark: Any) -> None:
    """Measure everything, write the JSON, and keep one time for pytest-benchmark's history."""
    found = epilogue_rows() + softmax_rows()
    benchmark.extra_info["rows"] = found
    report(found)
    model = torch.compile(Feature().cuda().eval().bfloat16(), backend=compile_fx, dynamic=True)
    x = torch.randn(16, 64, 128, 128, device="cuda", dtype=torch.bfloat16)
    benchmark.pedantic(lambda: (model(x), torch.cuda.synchronize()), rounds=ROUNDS, warmup_rounds=3)
