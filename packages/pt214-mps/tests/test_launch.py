"""What reaches the device: kernel by dtype, order of arguments, whole simdgroups of threads."""

from typing import Any

import pytest
import torch
from pt214_mps.kernels import rms_norm, shaders
from pt214_mps.ops import rms_norm as op

COLS = [1, 31, 32, 33, 127, 128, 129, 1000, 1024, 4095, 4096, 4097, 65_536]


@pytest.mark.parametrize("cols", COLS)
def test_lanes_fill_whole_simdgroups_and_fit_a_threadgroup(cols: int) -> None:
    lanes = rms_norm.lanes_for(cols)
    assert lanes % 32 == 0
    assert 32 <= lanes <= 1024
    assert lanes == 1024 or lanes * rms_norm.COLS_PER_LANE >= cols


@pytest.mark.parametrize(
    ("dtype", "suffix"),
    [(torch.float32, "float"), (torch.float16, "half"), (torch.bfloat16, "bfloat")],
)
def test_forward_picks_the_kernel_of_the_dtype_and_one_group_per_row(
    dtype: torch.dtype, suffix: str, recorder: Any
) -> None:
    x, w = torch.ones(5, 129, dtype=dtype), torch.ones(129, dtype=dtype)
    y, rstd = torch.empty_like(x), torch.empty(5)
    rms_norm.forward(y, rstd, x, w, 1e-6)
    ((kernel, args, threads, group_size),) = recorder.launches
    assert kernel == f"rms_norm_forward_{suffix}"
    assert [id(a) for a in args[:4]] == [id(t) for t in (y, rstd, x, w)]
    assert args[4:] == (129, 1e-6)
    assert (threads, group_size) == (5 * 64, 64)


def test_backward_passes_its_arguments_in_the_order_of_the_shader(recorder: Any) -> None:
    x, w, rstd = torch.ones(3, 8), torch.ones(8), torch.ones(3)
    dx, dy = torch.empty_like(x), torch.ones_like(x)
    rms_norm.backward(dx, dy, x, w, rstd)
    ((kernel, args, threads, group_size),) = recorder.launches
    assert kernel == "rms_norm_backward_float"
    assert [id(a) for a in args[:5]] == [id(t) for t in (dx, dy, x, w, rstd)]
    assert args[5:] == (8,)
    assert (threads, group_size) == (3 * 32, 32)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
def test_no_rows_launch_nothing(
    shape: tuple[int, ...], recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal refuses an empty grid. The device's own functions run here, on CPU tensors."""
    monkeypatch.setattr(op, "available", lambda: True)
    x, w = torch.ones(shape), torch.ones(8)
    y, rstd = op._rms_norm_mps(x, w, 1e-6)
    dx, dw = op._rms_norm_backward_mps(y, x, w, rstd)
    assert (y.shape, rstd.shape, dx.shape) == (x.shape, x.shape[:-1], x.shape)
    assert torch.equal(dw, torch.zeros(8))
    assert recorder.launches == []
    op._rms_norm_mps(torch.ones(1, 8), w, 1e-6)
    assert len(recorder.launches) == 1  # so the recorder would have seen one


def test_every_launched_kernel_is_instantiated_in_the_shader() -> None:
    text = shaders.source("rms_norm")
    for suffix in rms_norm.SUFFIX.values():
        assert f"INSTANTIATE({suffix}, {suffix})" in text
    for direction in ("forward", "backward"):
        assert f'host_name("rms_norm_{direction}_" #name)' in text


@pytest.mark.skipif(shaders.available(), reason="this machine has MPS")
def test_loading_a_shader_without_mps_says_why() -> None:
    with pytest.raises(shaders.ShaderUnavailable, match=r"rms_norm.metal needs an Apple GPU"):
        shaders.library("rms_norm")
