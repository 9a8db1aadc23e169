"""Save on N ranks, load on M, compare bits; and one process without any group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from pt214_dcp.compat import local_tensor
from pt214_dcp.layout import Box
from pt214_dcp.reader import open_checkpoint, read_tensor
from pt214_dcp.staging import bits
from pt214_dcp.state import build
from torch.distributed.device_mesh import init_device_mesh as mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.qint32, torch.quint8, torch.quint2x4, torch.quint4x2}


def every_dtype(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for dtype in DTYPES:
        if dtype not in QUANTIZED:
            size = 35 * dtype.itemsize
            high = 2 if dtype == torch.bool else 256
            raw = torch.randint(high, (size,), generator=generator, dtype=torch.uint8)
            found[str(dtype)] = raw.view(dtype).view(5, 7).t()  # not contiguous
    return found


@pytest.mark.filterwarnings("ignore:.*Complex(Half|32) support is experimental")
def test_every_dtype_comes_back_bit_by_bit(tmp_path: Path) -> None:
    state = every_dtype(1)
    assert len(state) > 20
    state |= {
        "0-d": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "conj": torch.tensor([1j]).conj(),
    }
    pt214_dcp.save(state, tmp_path)
    blank = {key: torch.zeros_like(value) for key, value in state.items()}
    pt214_dcp.load(blank, tmp_path)
    wrong = [key for key in state if not torch.equal(bits(blank[key]), bits(state[key]))]
    assert wrong == []


def test_scalars_and_nesting_come_back_in_the_same_containers(tmp_path: Path) -> None:
    values = [
        True,
        None,
        -3,
        2**80,
        0.1,
        float("-inf"),
        1 - 2j,
        "ü\n\0",
        "",
        b"\0\xff",
        (1, (2.0,)),
    ]
    inner: list[Any] = [0] * (len(values) - 1) + [(0, (0.0,))]
    pt214_dcp.save({"v": values, 7: {"a/b": 1, "[0]": 2, 0: 3}}, tmp_path)
    blank: dict[Any, Any] = {"v": inner, 7: {"a/b": 0, "[0]": 0, 0: 0}}
    pt214_dcp.load(blank, tmp_path)
    assert blank == {"v": values, 7: {"a/b": 1, "[0]": 2, 0: 3}}
    assert blank["v"] is inner


def global_state(fill: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"odd": (7, 5), "wide": (3, 1001), "one": (1, 9), "big": (1300, 300), "vector": (11,)}
    return {
        key: torch.randn(shape, generator=generator) if fill else torch.zeros(shape)
        for key, shape in shapes.items()
    }


def placed(fill: bool) -> dict[str, Any]:
    size = dist.get_world_size()
    mesh = mesh_of("cpu", (size,))
    two = mesh_of("cpu", (2, size // 2)) if size % 2 == 0 else mesh_of("cpu", (1, size))
    whole = global_state(fill)
    state: dict[str, Any] = {"plain": {k: v.clone() for k, v in whole.items()}, "step": 5 * fill}
    for name, on, placements in (
        ("rows", mesh, [Shard(0)]),
        ("replica", mesh, [Replicate()]),
        ("last", mesh, [Shard(-1)]),
        ("rows2", two, [Shard(0), Shard(0)]),
        ("hsdp", two, [Replicate(), Shard(0)]),
    ):
        state[name] = {
            k: distribute_tensor(v, on, placements, src_data_rank=None) for k, v in whole.items()
        }
    return state


def save_rank(rank: int, folder: str) -> None:
    handle = pt214_dcp.save(placed(fill=True), f"{folder}/from-{dist.get_world_size()}")
    assert handle.durable_s is not None
    assert handle.size_bytes is not None
    assert handle.blocked_s <= handle.durable_s
    assert 0 < handle.rank_size_bytes < handle.size_bytes


def load_rank(rank: int, folder: str) -> None:
    wanted = placed(fill=True)
    for source in (1, 2, 3, 4):
        state = placed(fill=False)
        pt214_dcp.load(state, f"{folder}/from-{source}")
        assert state.pop("step") == 5
        for name, tensors in state.items():
            for key, tensor in tensors.items():
                # Local parts: torch made both, so a part in the wrong place would show.
                found, right = local_tensor(tensor), local_tensor(wanted[name][key])
                assert torch.equal(found, right), (name, key, source)


def test_what_n_ranks_saved_any_m_ranks_load(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    for size in (1, 2, 3, 4):
        run_ranks(size, save_rank, str(tmp_path))
    for size in (1, 2, 3, 4):
        run_ranks(size, load_rank, str(tmp_path))


def differ_rank(rank: int, folder: str) -> None:
    with pytest.raises(pt214_dcp.RanksDiffer, match=r"rank 1: x is .* with content"):
        pt214_dcp.save({"x": torch.ones(3) * (rank == 1)}, folder)
    with pytest.raises(pt214_dcp.RanksDiffer, match=r"rank 1: lr is 1 here, 0 there"):
        pt214_dcp.save({"lr": int(rank == 1)}, folder)
    with pytest.raises(pt214_dcp.RanksDiffer, match=r"rank 1: extra is .* here, nothing there"):
        pt214_dcp.save({"x": 1} | ({"extra": torch.ones(1)} if rank == 1 else {}), folder)
    bad = {"x": print if rank == 1 else 0}
    kind = pt214_dcp.NotData if rank == 1 else pt214_dcp.SaveFailed
    with pytest.raises(kind, match="x: a builtin_function_or_method is not data"):
        pt214_dcp.save(bad, folder)
    pt214_dcp.save({"x": 1}, folder)  # and the next save just works
    with pytest.raises(pt214_dcp.StateMismatch if rank == 0 else pt214_dcp.LoadFailed):
        pt214_dcp.load({"x": 0} | ({"y": 0} if rank == 0 else {}), folder)


def test_unequal_ranks_are_named_on_all_ranks(
    run_ranks: Callable[..., None], tmp_path: Path
) -> None:
    run_ranks(3, differ_rank, str(tmp_path / "c"))


def test_all_mismatches_are_listed_in_one_error_and_nothing_is_written(tmp_path: Path) -> None:
    pt214_dcp.save(
        {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "d": 1, "k": 2}, tmp_path
    )
    state = {
        "a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int8), "c": 0, "d": 0, "new": 1
    }  # fmt: skip
    with pytest.raises(pt214_dcp.StateMismatch) as caught:
        pt214_dcp.load(state, tmp_path)
    error = caught.value
    assert (error.missing, error.unexpected) == (("new",), ("k",))
    assert [line.split(":")[0] for line in error.different] == ["a", "b", "c"]
    assert state["d"] == 0
    assert all(word in str(error) for word in ("(2,)", "(3,)", "torch.int8", "tensor"))


def test_a_tensor_may_change_as_soon_as_async_save_returns(tmp_path: Path) -> None:
    state = {"w": torch.ones(3_000_000)}
    handle = pt214_dcp.async_save(state, tmp_path)
    state["w"].zero_()
    handle.wait()
    pt214_dcp.load(state, tmp_path)
    assert bool((state["w"] == 1).all())


def test_a_checkpoint_is_read_without_a_template(tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "a": {"w": torch.arange(12.0).view(3, 4)},
        "l": [1, torch.ones(2), (None, "x")],
    }
    pt214_dcp.save(state, tmp_path / "c")
    checkpoint = open_checkpoint(tmp_path / "c")
    found = build(checkpoint.tree, [read_tensor(checkpoint, key) for key in checkpoint.tensors])
    assert found["l"][0] == 1
    assert found["l"][2] == (None, "x")
    assert torch.equal(found["a"]["w"], state["a"]["w"])
    assert torch.equal(found["l"][1], state["l"][1])
    part = read_tensor(checkpoint, "a/w", Box((1, 1), (2, 2)))
    assert torch.equal(part, state["a"]["w"][1:3, 1:3])
