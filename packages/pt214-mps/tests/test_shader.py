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
# Below, on and above a simdgroup, 4 columns a lane and 32 simdgroups; odd sizes; rows longer than
# 15 and 16 bits count.
CASES = [
    (1, 1), (17, 1), (5, 2), (2, 31), (4, 32), (3, 33), (1, 127), (3, 128), (2, 129), (2, 511),
    (1, 1000), (1, 2047), (2, 2049), (1, 4095), (1, 4096), (1, 4097), (1, 32_767), (1, 32_769),
    (2, 50_001), (1, 65_535), (1, 65_536),
]  # fmt: skip
TINY = 1e-30  # what is all zero must come out as zero
FAR_ROW = 70_000  # times 65,536 columns: past 2^32 elements

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


def worst_error(
    program: Path, dtype: torch.dtype, rows: int, cols: int, *, first: int = 0, scale: float = 1.0
) -> float:
    """Largest error of y, rstd and dx, in units of the tolerance; x is of size ``scale``."""
    torch.manual_seed(rows * cols)
    x, w, dy = (torch.randn(size).to(dtype) for size in ((rows, cols), (cols,), (rows, cols)))
    x = (x * scale).to(dtype)
    sizes = torch.tensor([rows, cols, rms_norm.lanes_for(cols), first])
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
        (y.double() - want).abs().max() / want.abs().max().clamp(min=TINY) / TOLERANCE[dtype],
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


def test_rows_past_2_to_the_32_elements_are_found(built: tuple[torch.dtype, Path]) -> None:
    dtype, program = built
    assert worst_error(program, dtype, 1, 65_536, first=FAR_ROW) <= 1


# Zero leaves eps alone under the root; 1e4 squared is past float16, and 1e-6 squared below eps.
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4])
def test_sizes_of_x_that_a_sum_in_its_own_dtype_would_lose(
    built: tuple[torch.dtype, Path], scale: float
) -> None:
    dtype, program = built
    assert worst_error(program, dtype, 2, 129, scale=scale) <= 1


@pytest.mark.parametrize(
    ("line", "broken", "cols"),
    [
        ("total / float(cols) + eps", "total + eps", 129),
        ("partial[simd] = value", "partial[0] = value", 129),
        ("float(x[i]) * along", "float(x[i]) * 0.0f", 129),
        ("i += lanes", "i += lanes + 1", 129),
        ("i < uint(cols)", "i < uint(cols) / 2 * 2", 129),
        ("ulong(row) * ulong(cols)", "0", 129),
        ("lane < simds ?", "lane < std::min(simds, 16u) ?", 2049),
        ("i < uint(cols)", "i < uint(int16_t(cols))", 32_769),
        ("i < uint(cols)", "i < uint(uint16_t(cols))", 65_536),
    ],
)
def test_a_broken_shader_is_noticed(line: str, broken: str, cols: int, tmp_path: Path) -> None:
    text = shaders.source("rms_norm")
    assert line in text
    program = build(tmp_path, "float", text.replace(line, broken))
    try:
        noticed = not worst_error(program, torch.float32, 2, cols) <= 1  # NaN is noticed, too
    except subprocess.CalledProcessError as crash:  # out of bounds
        noticed = crash.returncode < 0
    assert noticed


def test_an_offset_of_32_bits_faults(tmp_path: Path) -> None:
    text = shaders.source("rms_norm")
    narrow = text.replace("ulong(row) * ulong(cols)", "ulong(row * uint(cols))")
    assert narrow != text
    program = build(tmp_path, "float", narrow)
    assert worst_error(program, torch.float32, 2, 129) <= 1
    with pytest.raises(subprocess.CalledProcessError, match=r"SIGSEGV|SIGBUS"):
        worst_error(program, torch.float32, 1, 65_536, first=FAR_ROW)
