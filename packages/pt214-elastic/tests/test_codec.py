"""State as bytes: exact, without pickle, and damage is told."""

from __future__ import annotations

import math

import pytest
import torch
from pt214_elastic import codec
from pt214_elastic.errors import StateError


def through(tree: object) -> object:
    return codec.unpack(*codec.pack(tree))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5), (3, 1, 4)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.randn(shape) * 3).to(dtype)
    back = through({"a": value, "b": [value.clone(), 1]})
    assert isinstance(back, dict)
    for item in (back["a"], back["b"][0]):
        assert item.dtype is dtype
        assert torch.equal(item, value)


def test_a_transposed_tensor_comes_back_equal() -> None:
    value = torch.randn(4, 6).t()
    assert torch.equal(through(value), value)  # type: ignore[arg-type]


def test_plain_values_keep_their_types() -> None:
    tree: object = {0: (1, 2.5, "x"), "n": None, "t": True, "l": [[], {}], "d": torch.bfloat16}
    assert through(tree) == tree
    assert through({"f": math.inf}) == {"f": math.inf}


def test_an_optimizer_comes_back_exactly() -> None:
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    twin = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    twin.load_state_dict(through(opt.state_dict()))  # type: ignore[arg-type]
    for index, state in opt.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(twin.state_dict()["state"][index][name], value)


def test_an_object_is_refused_with_its_place() -> None:
    with pytest.raises(StateError, match="/a/1 is a object"):
        codec.pack({"a": [1, object()]})


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(StateError, match="layout"):
        codec.pack({"s": torch.eye(2).to_sparse()})


def test_a_damaged_outline_is_told() -> None:
    outline, flat = codec.pack({"a": torch.ones(3)})
    with pytest.raises(StateError, match="damaged"):
        codec.unpack(outline[:-3], flat)
    with pytest.raises(StateError, match="damaged"):
        codec.unpack(outline, flat[:4])
    with pytest.raises(StateError, match="damaged"):
        codec.unpack(b'["x"]', flat)


def test_a_changed_byte_changes_the_checksum() -> None:
    flat = torch.arange(100, dtype=torch.uint8)
    before = codec.checksum(flat)
    flat[50] ^= 1
    assert codec.checksum(flat) != before
