"""Through torch's own interface, and from and to other formats, bit by bit."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pt214_dcp
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from pt214_dcp.__main__ import main
from pt214_dcp.interop.distcp import read_distcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as stock_load
from torch.distributed.checkpoint.state_dict_saver import async_save as stock_async_save
from torch.distributed.checkpoint.state_dict_saver import save as stock_save
from torch.distributed.device_mesh import init_device_mesh as mesh_of
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
Run = Callable[..., None]


def state(value: float) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((300, 20), value), "half": torch.full((7,), value).bfloat16()},
        "list": [torch.full((3,), value), {"deep": torch.full((2, 2), value)}],
        "empty": torch.zeros(0, 3),
        "step": int(value),
        "lr": value / 3,
        "names": ["a", "b"],
        "none": None,
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_torch_saves_through_our_writer_and_everybody_loads(tmp_path: Path) -> None:
    stock_save(state(3), storage_writer=pt214_dcp.Writer(tmp_path / "c"), no_dist=True)
    pt214_dcp.verify(tmp_path / "c")
    found = state(0)
    pt214_dcp.load(found, tmp_path / "c")
    assert same(found, state(3))
    found = state(0)
    stock_load(found, storage_reader=pt214_dcp.Reader(tmp_path / "c"), no_dist=True)
    assert same(found, state(3))


def test_torch_loads_what_we_saved(tmp_path: Path) -> None:
    pt214_dcp.save(state(5), tmp_path)
    found = state(0)
    stock_load(found, storage_reader=pt214_dcp.Reader(tmp_path), no_dist=True)
    assert same(found, state(5))


def test_replacing_through_the_writer_is_atomic_too(tmp_path: Path) -> None:
    writer = pt214_dcp.Writer(tmp_path)
    for value in (1, 2):
        stock_save(state(value), storage_writer=writer, no_dist=True)
    assert len(list(tmp_path.glob("gen-*"))) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pt214_dcp.interop.stock_writer.commit.commit", _fail)
        with pytest.raises(CheckpointException, match="no more"):
            stock_save(state(3), storage_writer=writer, no_dist=True)
    found = state(0)
    pt214_dcp.load(found, tmp_path)
    assert same(found, state(2))


def _fail(*_: object) -> None:
    raise OSError("no more")


def test_what_torch_would_pickle_is_refused_by_its_name(tmp_path: Path) -> None:
    bad = {"model": {"w": torch.ones(2)}, "extra": {"f": {1, 2}}}
    with pytest.raises(CheckpointException, match=r"extra\.f: a set is not data"):
        stock_save(bad, storage_writer=pt214_dcp.Writer(tmp_path / "c"), no_dist=True)
    assert not (tmp_path / "c" / "COMMIT.json").exists()


def unflattened(value: float) -> dict[str, Any]:
    """Values that torch hands over whole, with tensors and arrays in them."""
    return {
        "pair": (torch.full((5,), value), {"deep": torch.full((2, 3), value).T}),
        "numpy": ("MT19937", np.full(6, int(value), dtype=np.uint32), 3, 0, 0.0),
        "w": torch.full((4,), value),
        "alone": (value, None),
    }


def values_on_ranks(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    stock_save(unflattened(2), storage_writer=pt214_dcp.Writer(f"{folder}/c"))
    found = unflattened(0)
    pt214_dcp.load(found, f"{folder}/c")
    assert same(found, unflattened(2))


@pytest.mark.parametrize("size", [1, 3])
def test_values_that_torch_keeps_whole_bring_their_tensors(
    run_ranks: Run, tmp_path: Path, size: int
) -> None:
    run_ranks(size, values_on_ranks, str(tmp_path))
    pt214_dcp.verify(tmp_path / "c")
    found = unflattened(0)
    stock_load(found, storage_reader=pt214_dcp.Reader(tmp_path / "c"), no_dist=True)
    assert same(found, unflattened(2))


def test_a_planner_that_flattens_nothing_works(tmp_path: Path) -> None:
    wanted = {"model": {"w": torch.ones(2), "n": [1, torch.zeros(3)]}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    stock_save(wanted, storage_writer=pt214_dcp.Writer(tmp_path), planner=planner, no_dist=True)
    found = {"model": {"w": torch.zeros(2), "n": [0, torch.ones(3)]}}
    pt214_dcp.load(found, tmp_path)
    assert same(found, wanted)


def sharded(value: float) -> dict[str, Any]:
    mesh = mesh_of("cpu", (dist.get_world_size(),))
    whole = torch.arange(77.0).view(11, 7) * value
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None),
        "copies": distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None),
        "plain": whole.clone(),
        "step": int(value),
    }


def on_ranks(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    stock_save(sharded(2), storage_writer=pt214_dcp.Writer(f"{folder}/ours"))
    found = sharded(0)
    pt214_dcp.load(found, f"{folder}/ours")
    assert all(_local_same(found[key], sharded(2)[key]) for key in found)
    pt214_dcp.save(sharded(3), f"{folder}/plain")
    found = sharded(0)
    stock_load(found, storage_reader=pt214_dcp.Reader(f"{folder}/plain"))
    assert all(_local_same(found[key], sharded(3)[key]) for key in found)
    stock_save(sharded(4), checkpoint_id=f"{folder}/stock")
    stock_async_save(sharded(5), storage_writer=pt214_dcp.Writer(f"{folder}/later")).result()  # type: ignore[union-attr]


def _local_same(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return bool(a == b)
    pair = [getattr(each, "_local_tensor", each) for each in (a, b)]
    return torch.equal(*pair)


def test_ranks_save_and_load_through_torch_and_others_read_it(
    run_ranks: Run, tmp_path: Path
) -> None:
    run_ranks(3, on_ranks, str(tmp_path))
    whole = torch.arange(77.0).view(11, 7)
    keys = ("rows", "columns", "copies", "plain")
    for name, value in (("ours", 2), ("plain", 3), ("later", 5)):
        found: dict[str, Any] = {key: torch.zeros(11, 7) for key in keys} | {"step": 0}
        pt214_dcp.load(found, tmp_path / name)
        assert all(torch.equal(found[key], whole * value) for key in keys), name
        assert found["step"] == value
    found = read_distcp(tmp_path / "stock")
    assert all(torch.equal(found[key], whole * 4) for key in keys)


@pytest.mark.parametrize("to", ["pt214", "stock", "torch"])
def test_there_and_back_keeps_every_bit(tmp_path: Path, to: str) -> None:
    pt214_dcp.save(state(7), tmp_path / "a")
    pt214_dcp.convert(tmp_path / "a", tmp_path / "b", to=to)
    pt214_dcp.convert(tmp_path / "b", tmp_path / "c")
    found = state(0)
    if to == "stock":  # stock keeps no empty part: the empty tensor is there, though
        found["empty"] = torch.zeros(0, 3)
    pt214_dcp.load(found, tmp_path / "c")
    assert same(found, state(7))


def test_stock_loads_what_convert_wrote(tmp_path: Path) -> None:
    pt214_dcp.save(state(7), tmp_path / "a")
    pt214_dcp.convert(tmp_path / "a", tmp_path / "b", to="stock")
    found = state(0)
    stock_load(found, checkpoint_id=tmp_path / "b", no_dist=True)
    assert same(found, state(7))


def test_a_hugging_face_folder_is_cut_in_files_and_comes_back(tmp_path: Path) -> None:
    from pt214_dcp.checkpoint import open_checkpoint
    from pt214_dcp.interop.huggingface import write_folder

    tensors = {f"layers.{at}.weight": torch.randn(100, 10) for at in range(5)}
    pt214_dcp.save({"model": tensors}, tmp_path / "a")
    write_folder(open_checkpoint(tmp_path / "a"), tmp_path / "b", most_bytes=9000)
    files = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert files[0] == "model-00001-of-00003.safetensors"
    assert files[-1] == "model.safetensors.index.json"
    pt214_dcp.convert(tmp_path / "b", tmp_path / "c")
    found = {key: torch.zeros(100, 10) for key in tensors}
    pt214_dcp.load(found, tmp_path / "c")
    assert same(found, tensors)
    pt214_dcp.convert(tmp_path / "a", tmp_path / "d", to="safetensors")
    assert same(safetensors.torch.load_file(tmp_path / "d" / "model.safetensors"), tensors)
    pt214_dcp.save({"w": torch.ones(1), "step": 3}, tmp_path / "e")
    with pytest.raises(pt214_dcp.NotData, match="tensors only; values: step"):
        pt214_dcp.convert(tmp_path / "e", tmp_path / "f", to="safetensors")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/pt214-was-here",)


@pytest.mark.parametrize(
    "attack",
    [
        pickle.dumps(Evil()),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cbuiltins\ngetattr\n(cos\nsystem\nS'x'\ntR.",
        b"ctorch.storage\n_load_from_bytes\n(C\x01xtR.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"ctorch\nload\n.",
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'__init__'\ntR.",
    ],
    ids=[
        "system",
        "eval",
        "getattr",
        "load_from_bytes",
        "prefix",
        "torch.load",
        "getattr of a class",
    ],
)
def test_a_hostile_metadata_file_runs_nothing(tmp_path: Path, attack: bytes) -> None:
    mark = Path("/tmp/pt214-was-here")
    mark.unlink(missing_ok=True)
    (tmp_path / ".metadata").write_bytes(attack)
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="does not belong in a checkpoint"):
        read_distcp(tmp_path)
    assert not mark.exists()


def test_a_reader_that_trusts_the_pickle_fails_the_hostile_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Called(Exception):
        pass

    def system(command: str) -> None:
        raise Called

    monkeypatch.setattr(os, "system", system)
    monkeypatch.setattr("pt214_dcp.interop.distcp._Unpickler", pickle.Unpickler)
    monkeypatch.setattr("pt214_dcp.interop.distcp.check_pickle", lambda *_: None)
    module = sys.modules[os.system.__module__]
    monkeypatch.setattr(module, "system", system, raising=False)
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'x'\ntR.")
    with pytest.raises(pt214_dcp.ChunkCorrupt) as caught:
        read_distcp(tmp_path)
    assert isinstance(caught.value.__cause__, Called)


def test_a_stock_checkpoint_that_is_damaged_or_reaches_outside_is_refused(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(100)}, checkpoint_id=tmp_path / "a", no_dist=True)
    (file,) = (tmp_path / "a").glob("*.distcp")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="w"):
        read_distcp(tmp_path / "a")
    data = (tmp_path / "a" / ".metadata").read_bytes()
    name = file.name.encode()
    (tmp_path / "a" / ".metadata").write_bytes(data.replace(name, b"../" + name[3:]))
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="is outside"):
        read_distcp(tmp_path / "a")


def test_a_flipped_bit_in_a_stock_file_is_noticed(tmp_path: Path) -> None:
    stock_save({"w": torch.ones(1000)}, checkpoint_id=tmp_path, no_dist=True)
    (file,) = tmp_path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    at = data.index(torch.ones(8).numpy().tobytes()) + 400
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="another crc32"):
        read_distcp(tmp_path)


def test_another_dtype_is_never_cast_in_silence(tmp_path: Path) -> None:
    pt214_dcp.save({"w": torch.ones(3)}, tmp_path)
    state = {"w": torch.zeros(3, dtype=torch.int8)}
    with pytest.raises(CheckpointException, match=r"w: checkpoint has dtype torch\.float32"):
        stock_load(state, storage_reader=pt214_dcp.Reader(tmp_path), no_dist=True)
    assert state["w"].tolist() == [0, 0, 0]


def test_a_list_place_that_lies_makes_no_list(tmp_path: Path) -> None:
    stock_save({"l": [torch.ones(1)]}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = {"l.0": ("l", 1 << 28)}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="more places than values"):
        read_distcp(tmp_path)


def test_convert_tells_what_it_can_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pt214_dcp.NotACheckpoint, match=r"neither COMMIT\.json nor \.metadata"):
        pt214_dcp.convert(tmp_path, tmp_path / "b")
    pt214_dcp.save({"w": torch.ones(1)}, tmp_path / "a")
    with pytest.raises(pt214_dcp.BadOption, match="to is 'zip'"):
        pt214_dcp.convert(tmp_path / "a", tmp_path / "b", to="zip")
    (tmp_path / "mine").write_text("x")
    with pytest.raises(pt214_dcp.BadPath, match="something lies here"):
        pt214_dcp.convert(tmp_path / "a", tmp_path / "mine", to="torch")
    with pytest.raises(pt214_dcp.NotACheckpoint, match="weights_only=True"):
        pt214_dcp.convert(tmp_path / "mine", tmp_path / "b")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "t"), "--to", "torch"]) == 0
    assert torch.load(tmp_path / "t", weights_only=True)["w"].tolist() == [1]
