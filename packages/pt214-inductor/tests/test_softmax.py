"""The op against float64, its gradient, its checks; and the kernel itself, interpreted."""

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from pt214_inductor import ops
from pt214_inductor.errors import ShapeError
from pt214_inductor.ops.softmax import reference

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

COLS = [1, 31, 32, 33, 1000, 1024, 4097]  # below, on and above powers of two
LONG = [16384, 16385, 20001]  # the last row in registers, and the first rows that loop
# Half a unit in the last place of a result below 1, and two for float32's exp, sum and division.
# Triton's interpreter truncates to bfloat16 instead of rounding: one whole unit there.
TOLERANCE = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def close(got: torch.Tensor, x: torch.Tensor, dim: int = -1) -> bool:
    exact = torch.softmax(x.double(), dim)
    return bool(((got.double() - exact).abs() <= TOLERANCE[x.dtype] * exact + 2**-24).all())


@needs_triton
@pytest.mark.parametrize("cols", COLS + LONG)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_every_size_match_float64(cols: int, dtype: torch.dtype) -> None:
    x = (torch.randn(3, cols, device=DEVICE) * 4).to(dtype)
    assert close(ops.softmax(x), x)


@needs_triton
@pytest.mark.cuda
@pytest.mark.parametrize("cols", [*COLS, *LONG, 128256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_match_float64_on_the_device(cols: int, dtype: torch.dtype) -> None:
    x = (torch.randn(257, cols, device="cuda") * 4).to(dtype)
    assert close(ops.softmax(x), x)


@needs_triton
def test_strided_rows_and_other_dims_are_read_right() -> None:
    x = torch.randn(4, 5, 70, device=DEVICE)
    assert close(ops.softmax(x[:, :, ::2]), x[:, :, ::2])
    assert close(ops.softmax(x[:, :, :33]), x[:, :, :33])
    assert close(ops.softmax(x, dim=1), x, dim=1)
    assert close(ops.softmax(x.transpose(0, 2), dim=0), x.transpose(0, 2), dim=0)


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("cols", [40, 20001])
def test_infinities_and_nan_give_what_eager_gives(cols: int) -> None:
    x = torch.randn(5, cols, device=DEVICE)
    x[0, 1:] = -math.inf
    x[1, :] = -math.inf
    x[2, 7] = math.inf
    x[3, 7] = math.nan
    torch.testing.assert_close(ops.softmax(x), torch.softmax(x, -1), equal_nan=True)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,)])
def test_empty_tensors_stay_empty(shape: tuple[int, ...]) -> None:
    assert ops.softmax(torch.empty(shape)).shape == shape


def test_the_gradient_is_the_analytic_one() -> None:
    x = torch.randn(3, 33, requires_grad=True)
    weight = torch.randn(3, 33)
    (got,) = torch.autograd.grad((ops.softmax(x) * weight).sum(), x)
    (wanted,) = torch.autograd.grad((torch.softmax(x, -1) * weight).sum(), x)
    torch.testing.assert_close(got, wanted)


def test_the_registration_passes_torchs_own_checks() -> None:
    x = torch.randn(3, 33, requires_grad=True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.pt214_inductor.softmax.default, (x,), test_utils=checks)


def test_the_definition_is_softmax() -> None:
    x = torch.randn(3, 33)
    assert close(reference(x), x)


def test_a_saboteur_without_the_maximum_is_caught() -> None:
    x = torch.full((2, 8), 200.0)
    assert not close(x.exp() / x.exp().sum(-1, keepdim=True), x)


@pytest.mark.parametrize(
    ("x", "dim", "message"),
    [
        (torch.ones(2, dtype=torch.int64), -1, "x: got torch.int64, allowed are float16"),
        (torch.tensor(1.0), -1, "x: got 0 dims, softmax needs at least 1"),
        (torch.ones(2, 2), 2, "dim: got 2, allowed are -2 to 1"),
    ],
)
def test_a_wrong_argument_is_named(x: torch.Tensor, dim: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ops.softmax(x, dim)


AHEAD_OF_TIME = """
import json, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pt214_inductor.kernels import softmax as k
found = {}
for capability in (90, 100):
    for kernel, block in ((k._softmax_row, k.MAX_BLOCK), (k._softmax_loop, k.LOOP_BLOCK)):
        signature = {"y_ptr": "*bf16", "x_ptr": "*bf16", "x_stride": "i64", "n_cols": "i32",
                     "BLOCK": "constexpr"}
        source = ASTSource(kernel, signature, {(4,): block})
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                               options={"num_warps": 16 if block == k.MAX_BLOCK else 8})
        found[f"{capability} {kernel.__name__}"] = len(built.asm["cubin"])
print(json.dumps(found))
"""


@needs_triton
def test_kernels_compile_ahead_of_time_for_hopper_and_blackwell() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", AHEAD_OF_TIME], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert len(sizes) == 4
    assert min(sizes.values()) > 0
