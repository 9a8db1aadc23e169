"""The op: its definition against float64, its gradient, its checks, and on a Mac its kernel."""

import pt214_mps
import pytest
import torch
from pt214_mps.kernels import shaders
from pt214_mps.nn import RMSNorm
from pt214_mps.ops import rms_norm as op
from torch.nn import functional as F

SHAPES = [(1, 1), (3, 31), (2, 32), (5, 33), (2, 3, 1000), (4, 1024), (0, 8), (1, 65_536)]
# Relative to the largest element: two roundings of the output's dtype, and float32 sums.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCE)
MPS = pytest.mark.mps


def draw(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def close(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, terms: torch.Tensor | None = None
) -> bool:
    """Equal up to rounding of the largest element of ``terms``, by default of the result."""
    error = (got.cpu().double() - want.cpu().double()).abs()
    scale = (want if terms is None else terms).abs().max() if want.numel() else 1.0
    return got.shape == want.shape and bool((error <= TOLERANCE[dtype] * scale).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("mps", marks=MPS)])
def test_forward_and_gradients_agree_with_float64(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    x = draw(*shape, dtype=dtype, device=device).requires_grad_()
    w = draw(shape[-1], dtype=dtype, device=device).requires_grad_()
    dy = draw(*shape, dtype=dtype, device=device)
    y = pt214_mps.rms_norm(x, w, 1e-5)
    dx, dw = torch.autograd.grad(y, (x, w), dy)

    wide_x = x.detach().cpu().double().requires_grad_()
    wide_w = w.detach().cpu().double().requires_grad_()
    want = F.rms_norm(wide_x, (shape[-1],), wide_w, 1e-5)
    want_dx, want_dw = torch.autograd.grad(want, (wide_x, wide_w), dy.cpu().double())
    assert y.dtype is dtype
    assert close(y, want, dtype)
    # dx is a difference: where N is 1 its two terms cancel but for eps.
    rstd = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + 1e-5)
    assert close(dx, want_dx, dtype, rstd * wide_w * dy.cpu().double())
    assert close(dw, want_dw, dtype)


def test_the_comparison_above_fails_a_wrong_twin() -> None:
    x, w = draw(4, 64, dtype=torch.float32), draw(64, dtype=torch.float32)
    want = F.rms_norm(x.double(), (64,), w.double(), 1e-5)
    unscaled = F.rms_norm(x, (64,), None, 1e-5)
    sum_not_mean = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-5) * w
    assert not close(unscaled, want, torch.float32)
    assert not close(sum_not_mean, want, torch.float32)


def test_strided_input_gives_the_numbers_of_its_contiguous_copy() -> None:
    x, w = draw(16, 8, dtype=torch.float32).t(), draw(16, dtype=torch.float32)
    assert torch.equal(pt214_mps.rms_norm(x, w), pt214_mps.rms_norm(x.contiguous(), w))


# The check itself reads .grad of a tensor that it made, and torch warns about that.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_accepts_the_registration() -> None:
    x = draw(3, 8, dtype=torch.float32).requires_grad_()
    w = draw(8, dtype=torch.float32).requires_grad_()
    torch.library.opcheck(torch.ops.pt214_mps.rms_norm.default, (x, w, 1e-6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.float64)}, "x: got torch.float64; allowed are float32"),
        ({"x": torch.ones(())}, r"x: got shape \(\); the last dim must be from 1 to 65536"),
        ({"x": torch.ones(2, 0)}, r"x: got shape \(2, 0\); the last dim must be from 1"),
        ({"x": torch.ones(1, 65_537)}, r"the last dim must be from 1 to 65536"),
        ({"w": torch.ones(5)}, r"w: got shape \(5,\); x needs \(4,\)"),
        ({"w": torch.ones(4, dtype=torch.float16)}, "w: got torch.float16; x has torch.float32"),
        ({"w": torch.ones(4, device="meta")}, "w: is on meta; x is on cpu"),
        ({"x": [[1.0]]}, "x: got list; it must be a torch.Tensor"),
        ({"w": None}, "w: got NoneType; it must be a torch.Tensor"),
        ({"x": torch.ones(2, 4).to_sparse()}, "x: got layout torch.sparse_coo; allowed is torch.s"),
        ({"w": torch.ones(4).to_sparse()}, "w: got layout torch.sparse_coo; allowed is torch.s"),
        ({"x": torch.ones(2, 4, dtype=torch.int32)}, "x: got torch.int32; allowed are float32"),
        ({"w": torch.ones(1, 4)}, r"w: got shape \(1, 4\); x needs \(4,\)"),
        ({"w": torch.tensor(1.0)}, r"w: got shape \(\); x needs \(4,\)"),
        ({"eps": -1.0}, r"eps: got -1.0; it must be from 0 to 3.402823e\+38, float32's largest"),
        ({"eps": float("nan")}, "eps: got nan; it must be from 0"),
        ({"eps": float("inf")}, "eps: got inf; it must be from 0"),
        ({"eps": 1e39}, r"eps: got 1e\+39; it must be from 0"),
        ({"eps": "1e-6"}, "eps: got str; it must be a float or an int"),
        ({"eps": None}, "eps: got NoneType; it must be a float or an int"),
        ({"eps": True}, "eps: got bool; it must be a float or an int"),
        ({"eps": torch.tensor(1e-6)}, "eps: got Tensor; it must be a float or an int"),
    ],
)
def test_each_bad_argument_is_named_with_what_is_allowed(
    change: dict[str, object], message: str
) -> None:
    arguments = {"x": torch.ones(2, 4), "w": torch.ones(4), "eps": 1e-6} | change
    with pytest.raises(pt214_mps.ArgumentError, match=message):
        pt214_mps.rms_norm(**arguments)  # type: ignore[arg-type]


def test_the_largest_and_smallest_eps_are_taken() -> None:
    x, w = torch.full((2, 4), 3.0), torch.ones(4)
    assert torch.equal(pt214_mps.rms_norm(x, w, 0), torch.ones(2, 4))
    assert bool(pt214_mps.rms_norm(x, w, torch.finfo(torch.float32).max).isfinite().all())


def test_the_checks_run_inside_a_compiled_function() -> None:
    x, w = draw(2, 4, dtype=torch.float32), draw(4, dtype=torch.float32)
    compiled = torch.compile(pt214_mps.rms_norm, backend="eager", fullgraph=True, dynamic=True)
    for eps in (1e-6, 1e-5, 1e-4):  # the second makes it symbolic
        assert torch.equal(compiled(x, w, eps), pt214_mps.rms_norm(x, w, eps))


@pytest.mark.skipif(shaders.available(), reason="this machine has MPS")
def test_an_mps_tensor_without_mps_says_what_to_do() -> None:
    # No such tensor can be made here, so what its kernel does first is called by itself.
    with pytest.raises(pt214_mps.NoMPS, match=r"x: is on mps, but .* move it to the CPU, or run"):
        op._need_mps()


def test_the_module_is_a_drop_in_for_torchs() -> None:
    ours, torchs = RMSNorm(16), torch.nn.RMSNorm(16)
    torch.nn.init.normal_(torchs.weight)
    ours.load_state_dict(torchs.state_dict())
    x = draw(4, 16, dtype=torch.float32)
    assert torch.equal(ours(x), torchs(x))
    assert isinstance(ours, torch.nn.RMSNorm)


def test_the_module_leaves_what_the_kernel_does_not_serve_to_torch() -> None:
    assert not RMSNorm(8).serves(torch.ones(2, 8))  # not on mps
    for module in (RMSNorm((2, 8)), RMSNorm(8, elementwise_affine=False)):
        x = draw(3, 2, 8, dtype=torch.float32)
        assert module(x).shape == x.shape


@pytest.mark.mps
def test_the_module_uses_the_kernel_on_mps() -> None:
    module = RMSNorm(64).to("mps")
    assert module.serves(torch.ones(2, 64, device="mps"))
