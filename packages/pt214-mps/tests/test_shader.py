"""The Metal source itself, compiled as C++ and run on the CPU thread by thread, against float64.

This checks arithmetic, indexing and barriers of the very file that a Mac compiles. It is no Mac:
Apple's compiler, its language rules and its memory model are not checked here.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from pt214_mps.kernels import rms_norm, shaders
from torch.nn import functional as F

SHIM = Path(__file__).parent / "metal"
EPS = 1e-5
# Two roundings of the output's dtype, relative to the largest term, and float32 sums.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CASES = [(1, 1), (2, 31), (3, 33), (2, 129), (1, 1000), (1, 4097)]

CXX = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++20 compiler: install g++ or clang")


def build(folder: Path, metal_type: str, text: str) -> Path:
    shared = "threadgroup float partial[MAX_SIMDS];"
    assert text.count(shared) == 2
    (folder / "rms_norm.metal").write_text(text.replace(shared, f"static {shared}"))
    program = folder / metal_type
    words = [str(CXX), "-std=c++20", "-O1", "-pthread", "-w", f"-DDATA={metal_type}"]
    words += ["-I", str(SHIM), "-I", str(folder), str(SHIM / "driver.cpp"), "-o", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module", params=list(TOLERANCE), ids=str)
def built(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[torch.dtype, Path]:
    folder = tmp_path_factory.mktemp("metal")
    dtype: torch.dtype = request.param
    return dtype, build(folder, rms_norm.SUFFIX[dtype], shaders.source("rms_norm"))


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def worst_error(program: Path, dtype: torch.dtype, rows: int, cols: int) -> float:
    """Largest error of y, rstd and dx, in units of the tolerance."""
    torch.manual_seed(rows * cols)
    x, w, dy = (torch.randn(size).to(dtype) for size in ((rows, cols), (cols,), (rows, cols)))
    sizes = torch.tensor([rows, cols, rms_norm.lanes_for(cols)])
    sent = b"".join(map(raw, (sizes, torch.tensor([EPS]), x, w, dy)))
    out = subprocess.run([str(program)], input=sent, capture_output=True, check=True).stdout
    edge = rows * cols * dtype.itemsize
    buffer = bytearray(out)
    y = torch.frombuffer(buffer, dtype=dtype, count=rows * cols).view(rows, cols)
    rstd = torch.frombuffer(buffer, dtype=torch.float32, count=rows, offset=edge)
    dx = torch.frombuffer(buffer, dtype=dtype, count=rows * cols, offset=edge + 4 * rows)

    wide_x, wide_w, wide_dy = x.double().requires_grad_(), w.double(), dy.double()
    want = F.rms_norm(wide_x, (cols,), wide_w, EPS)
    (want_dx,) = torch.autograd.grad(want, wide_x, wide_dy)
    want_rstd = torch.rsqrt(wide_x.detach().square().mean(-1) + EPS)
    terms = want_rstd.unsqueeze(-1) * wide_w * wide_dy  # dx is a difference of terms this large
    errors = [
        (y.double() - want).abs().max() / want.abs().max() / TOLERANCE[dtype],
        (rstd.double() - want_rstd).abs().max() / want_rstd.max() / TOLERANCE[torch.float32],
        (dx.double().view(rows, cols) - want_dx).abs().max() / terms.abs().max() / TOLERANCE[dtype],
    ]
    return float(torch.stack(errors).max().detach())


@pytest.mark.parametrize(("rows", "cols"), CASES)
def test_the_shader_computes_rms_norm_and_its_gradient(
    built: tuple[torch.dtype, Path], rows: int, cols: int
) -> None:
    dtype, program = built
    assert worst_error(program, dtype, rows, cols) <= 1


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("total / float(cols) + eps", "total + eps"),
        ("partial[simd] = value", "partial[0] = value"),
        ("float(x[i]) * along", "float(x[i]) * 0.0f"),
        ("i += lanes", "i += lanes + 1"),
    ],
)
def test_a_broken_shader_is_noticed(line: str, broken: str, tmp_path: Path) -> None:
    text = shaders.source("rms_norm")
    assert line in text
    program = build(tmp_path, "float", text.replace(line, broken))
    assert worst_error(program, torch.float32, 2, 129) > 1
