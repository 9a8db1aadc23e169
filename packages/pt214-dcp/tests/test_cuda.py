"""State on a GPU: every dtype, any strides, side streams; loaded straight back to the device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = sorted(
    {
        found
        for found in vars(torch).values()
        if isinstance(found, torch.dtype) and found.itemsize and "q" not in str(found)
        and not str(found).startswith(("torch.bits", "torch.int1", "torch.uint1"))
        and found.itemsize * 8 >= 8
    },
    key=str,
)  # fmt: skip
MIB = 1 << 20
SLEEP: Any = torch.cuda._sleep


def stream() -> Any:
    made: Any = torch.cuda.Stream
    return made()


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def held() -> Iterator[tuple[str, torch.Tensor]]:
    """Random bits as each dtype that a CUDA tensor can have."""
    for dtype in DTYPES:
        try:
            bits = torch.randint(
                0, 2 if dtype == torch.bool else 256, (64 * 16,), dtype=torch.uint8
            )
            yield str(dtype), bits.cuda().view(dtype)
        except RuntimeError:  # a dtype of less than a byte, or one without a view
            continue


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_every_dtype_comes_back_to_the_device_bit_for_bit(tmp_path: Path, call: str) -> None:
    torch.manual_seed(0)
    saved = dict(held())
    assert len(saved) >= 12
    getattr(pt214_dcp, call)(saved, tmp_path).wait()
    found = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    pt214_dcp.load(found, tmp_path)
    for name, tensor in saved.items():
        assert found[name].is_cuda
        assert raw(found[name]) == raw(tensor), name


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_strides_and_shared_storage_are_kept(tmp_path: Path, call: str) -> None:
    base = torch.randn(300, 70, device="cuda")
    saved: dict[str, Any] = {"t": base.t(), "part": base[::3, 5:9], "tied": base, "again": base,
                             "zero": torch.tensor(3.0, device="cuda"),
                             "none": torch.empty(0, 4, device="cuda")}  # fmt: skip
    getattr(pt214_dcp, call)(saved, tmp_path).wait()
    found: dict[str, Any] = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    found["t"] = torch.zeros(70, 300, device="cuda")
    pt214_dcp.load(found, tmp_path)
    assert all(torch.equal(found[key], saved[key]) for key in saved)


def test_a_tensor_may_change_once_the_call_returns(tmp_path: Path) -> None:
    saved = {"w": torch.full((64 * MIB // 4,), 1.0, device="cuda")}
    handle = pt214_dcp.async_save(saved, tmp_path)
    saved["w"].fill_(2.0)
    handle.wait()
    pt214_dcp.load(saved, tmp_path)
    assert bool((saved["w"] == 1).all())


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_what_another_stream_still_writes_is_waited_for(tmp_path: Path, call: str) -> None:
    """The caller's stream waits for the other, as torch asks; the copy must follow that stream."""
    tensor = torch.zeros(16 * MIB, device="cuda")
    side = stream()
    with torch.cuda.stream(side):
        SLEEP(400_000_000)  # cycles: some tenths of a second
        tensor.fill_(3.0)
        handle = getattr(pt214_dcp, call)({"w": tensor}, tmp_path)
    handle.wait()
    found = {"w": torch.zeros_like(tensor)}
    pt214_dcp.load(found, tmp_path)
    assert bool((found["w"] == 3).all())


def test_a_load_is_done_when_it_returns(tmp_path: Path) -> None:
    pt214_dcp.save({"w": torch.full((16 * MIB,), 4.0)}, tmp_path)
    found = {"w": torch.zeros(16 * MIB, device="cuda")}
    pt214_dcp.load(found, tmp_path)
    with torch.cuda.stream(stream()):  # not ordered after the stream of the load
        assert bool((found["w"] == 4).all())


def test_the_host_and_the_device_load_each_others_checkpoints(tmp_path: Path) -> None:
    tensor = torch.randn(1000)
    pt214_dcp.save({"w": tensor.cuda()}, tmp_path)
    found = {"w": torch.zeros(1000)}
    pt214_dcp.load(found, tmp_path)
    assert torch.equal(found["w"], tensor)


def test_a_small_budget_stages_window_by_window(tmp_path: Path) -> None:
    saved = {f"w{at}": torch.full((MIB,), float(at), device="cuda") for at in range(40)}
    pt214_dcp.async_save(saved, tmp_path, staging_bytes=32 * MIB).wait()
    found = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    pt214_dcp.load(found, tmp_path)
    assert all(torch.equal(found[key], saved[key]) for key in saved)


def test_a_model_and_its_optimizer_resume_bit_for_bit(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)
        )
        model.cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 32, device="cuda")).square().mean().backward()
        optimizer.step()

    model, optimizer = made()
    step(model, optimizer)
    rng = torch.cuda.get_rng_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng}
    handle = pt214_dcp.async_save(state, tmp_path, overlap=optimizer)
    step(model, optimizer)
    handle.wait()
    twin, fresh = made()
    found = pt214_dcp.read(tmp_path)
    twin.load_state_dict(found["model"])
    fresh.load_state_dict(found["optimizer"])
    torch.cuda.set_rng_state(found["rng"])
    step(twin, fresh)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, two)
