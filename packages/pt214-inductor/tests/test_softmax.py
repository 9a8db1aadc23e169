"""The op: definition against float64, gradient, messages; its kernel in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch
from pt214_inductor import ops
from pt214_inductor.errors import ShapeError

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)
COLS = [1, 31, 32, 33, 1000, 1024, 4097]
INTERPRETED = """
import torch
from pt214_inductor import ops
torch.manual_seed(0)
for cols in {cols}:
    for dtype in (torch.float32, torch.float16):
        x = (torch.randn(3, cols) * 10).to(dtype)
        want = torch.softmax(x.double(), -1)
        got = ops.softmax(x).double()
        assert (got - want).abs().max() <= (1e-6 if dtype is torch.float32 else 1e-3), (cols, dtype)
x = torch.full((2, 33), float("-inf")); x[:, 3] = 0
assert ops.softmax(x)[:, 3].tolist() == [1.0, 1.0]
print("kernel ran")
"""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_op_agrees_with_float64_in_every_dim(dtype: torch.dtype, device: str) -> None:
    for cols in COLS:
        x = (torch.randn(2, cols, 3) * 8).to(device, dtype)
        for dim in (0, 1, -1):
            got = ops.softmax(x, dim)
            want = torch.softmax(x.double(), dim)
            assert got.dtype is dtype
            assert (got.double() - want).abs().max() <= TOLERANCE[dtype]


def test_the_gradient_is_torchs() -> None:
    x = torch.randn(4, 33, requires_grad=True)
    dy = torch.randn(4, 33)
    (got,) = torch.autograd.grad(ops.softmax(x), x, dy)
    (want,) = torch.autograd.grad(torch.softmax(x, -1), x, dy)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("x", "dim", "message"),
    [
        (torch.ones(2, dtype=torch.int64), -1, "x: got torch.int64, allowed are float16"),
        (torch.ones(()), -1, "x: got 0 dims"),
        (torch.ones(2, 2), 2, "dim: got 2, allowed are -2 to 1"),
    ],
)
def test_each_bad_argument_is_named(x: torch.Tensor, dim: int, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        ops.softmax(x, dim)


def test_an_empty_tensor_stays_empty() -> None:
    assert ops.softmax(torch.ones(0, 5)).shape == (0, 5)


def test_the_kernel_is_right_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(cols=COLS)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "kernel ran\n", done.stderr
