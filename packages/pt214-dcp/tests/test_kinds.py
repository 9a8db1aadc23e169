"""Every kind of value: numpy, what each rank has for itself, memory that tensors share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pt214_dcp
import pytest
import safetensors.torch
import torch
from pt214_dcp import PerRank
from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.reader import build, read_tensor

Run = Callable[..., None]
ROW = torch.arange(1_000_000.0).view(1000, 1000)


def data_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("gen-*/rank-*.safetensors"))


def test_numpy_arrays_and_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    kinds = ["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8"]
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    rng = np.random.RandomState(3).get_state(legacy=False)
    saved = {"a": arrays, "n": np.float32(1.5), "rng": rng, "t": arrays["f4"].T}
    pt214_dcp.save(saved, tmp_path)
    blank = {kind: np.zeros((2, 3), kind) for kind in kinds}
    empty_rng = np.random.RandomState(4).get_state(legacy=False)
    found: dict[str, Any] = {"a": blank, "n": np.float32(0), "rng": empty_rng}
    found["t"] = np.zeros((3, 2), "f4")
    pt214_dcp.load(found, tmp_path)
    assert all(np.array_equal(found["a"][kind], arrays[kind]) for kind in kinds)
    assert found["a"]["i4"] is blank["i4"]
    assert (type(found["n"]), found["n"]) == (np.float32, 1.5)
    state = np.random.RandomState()
    state.set_state(found["rng"])
    assert state.randint(1 << 30) == np.random.RandomState(3).randint(1 << 30)
    assert np.array_equal(found["t"], arrays["f4"].T)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array(["x"]), "is not data"),
        (np.array([object()]), "is not data"),
        (np.array(["2020-01-01"], "datetime64[D]"), "is not data"),
        (np.arange(3).astype(">i4"), "byte order"),
        (np.arange(3)[::-1], "runs backwards"),
    ],
)
def test_an_array_that_is_no_data_is_refused_by_its_key(
    tmp_path: Path, array: Any, words: str
) -> None:
    with pytest.raises(pt214_dcp.NotData, match=rf"a/b: .*{words}"):
        pt214_dcp.save({"a": {"b": array}}, tmp_path)


def test_a_read_only_array_is_saved_but_not_filled(tmp_path: Path) -> None:
    array = np.arange(3)
    array.flags.writeable = False
    pt214_dcp.save({"a": array}, tmp_path)
    with pytest.raises(pt214_dcp.NotData, match="a: a read-only numpy array can't be filled"):
        pt214_dcp.load({"a": array}, tmp_path)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    linear = torch.nn.Linear(1000, 1000, bias=False)
    pt214_dcp.save({"a": linear.weight, "b": linear.weight.detach()}, tmp_path)
    assert data_bytes(tmp_path) < 1.01 * 4_000_000
    found = {"a": torch.zeros(1000, 1000), "b": torch.zeros(1000, 1000)}
    pt214_dcp.load(found, tmp_path)
    assert torch.equal(found["a"], linear.weight)
    assert torch.equal(found["b"], linear.weight)


def test_views_of_the_same_memory_are_written_once(tmp_path: Path) -> None:
    views = {"top": ROW[:900], "turned": ROW.t(), "strip": ROW[50:, 3:400:7]}
    pt214_dcp.save(views, tmp_path)
    assert data_bytes(tmp_path) < 1.01 * 4_000_000
    found = {key: torch.zeros(value.shape) for key, value in views.items()}
    pt214_dcp.load(found, tmp_path)
    assert all(torch.equal(found[key], views[key]) for key in views)
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(read_tensor(checkpoint, "strip"), views["strip"])
    assert torch.equal(build(checkpoint)["turned"], views["turned"])


def test_a_small_view_of_much_memory_writes_only_itself(tmp_path: Path) -> None:
    pt214_dcp.save({"row": ROW[3], "column": ROW[:, 3]}, tmp_path)
    assert data_bytes(tmp_path) < 20_000


def test_a_load_into_views_of_shared_memory_fills_it(tmp_path: Path) -> None:
    pt214_dcp.save({"a": ROW[:500].clone(), "b": ROW[500:].clone()}, tmp_path)
    whole = torch.zeros(1000, 1000)
    pt214_dcp.load({"a": whole[:500], "b": whole[500:]}, tmp_path)
    assert torch.equal(whole, ROW)


def test_conjugate_and_negative_views_keep_their_values(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    pt214_dcp.save({"c": value.conj(), "n": value.conj().imag}, tmp_path)
    into = torch.zeros(2, dtype=torch.complex64)
    found = {"c": into.conj(), "n": torch.zeros(2)}
    pt214_dcp.load(found, tmp_path)
    assert torch.equal(found["c"], value.conj())
    assert torch.equal(found["n"], value.conj().imag)


def test_cast_and_partial_are_done_only_by_choice_and_reported(tmp_path: Path) -> None:
    pt214_dcp.save({"w": torch.arange(4.0), "old": torch.ones(1), "n": 1}, tmp_path)
    found: dict[str, Any] = {
        "w": torch.zeros(4, dtype=torch.bfloat16),
        "new": torch.zeros(2),
        "n": 0,
    }
    with pytest.raises(pt214_dcp.StateMismatch, match="cast=True converts it"):
        pt214_dcp.load(found, tmp_path, partial=True)
    with pytest.raises(pt214_dcp.StateMismatch, match="new"):
        pt214_dcp.load(found, tmp_path, cast=True)
    assert found["n"] == 0
    report = pt214_dcp.load(found, tmp_path, cast=True, partial=True)
    assert (report.missing, report.unexpected, report.cast) == (("new",), ("old",), ("w",))
    assert found["w"].tolist() == [0, 1, 2, 3]
    assert found["n"] == 1


def test_data_files_are_valid_safetensors(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 5), "b": torch.ones(2, dtype=torch.bfloat16), "i": torch.arange(3)}
    pt214_dcp.save(state, tmp_path)
    (file,) = tmp_path.glob("gen-*/*.safetensors")
    found = safetensors.torch.load_file(file)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], state[key]) for key in state)


def per_rank(rank: int, path: str) -> None:
    own = {"rng": torch.full((5,), rank), "n": rank, "s": f"rank {rank}"}
    pt214_dcp.save({"own": PerRank(own), "w": torch.ones(3)}, path)
    blank = PerRank({"rng": torch.zeros(5, dtype=torch.int64), "n": -1, "s": ""})
    pt214_dcp.load({"own": blank, "w": torch.zeros(3)}, path)
    assert blank.value["rng"].tolist() == [rank] * 5
    assert (blank.value["n"], blank.value["s"]) == (rank, f"rank {rank}")
    with pytest.raises(pt214_dcp.RanksDiffer, match="PerRank for what each rank has for itself"):
        pt214_dcp.save({"rng": torch.full((5,), rank)}, path)


def test_what_is_per_rank_comes_back_to_its_rank(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(3, per_rank, str(tmp_path / "c"))
    blank = PerRank({"rng": torch.zeros(5, dtype=torch.int64), "n": -1, "s": ""})
    state = {"own": blank, "w": torch.zeros(3)}
    with pytest.raises(pt214_dcp.StateMismatch, match=r"own: each of 3 ranks saved its own"):
        pt214_dcp.load(state, tmp_path / "c")
    blank.resize = pt214_dcp.Resize.KEEP
    pt214_dcp.load(state, tmp_path / "c")
    assert blank.value["n"] == -1
    blank.resize = pt214_dcp.Resize.WRAP
    pt214_dcp.load(state, tmp_path / "c")
    assert blank.value["n"] == 0
    with pytest.raises(ValueError, match="resize is 'maybe'"):
        PerRank(1, resize="maybe")


def stages(rank: int, path: str) -> None:
    """Two pipeline stages of two replicas each: other keys, one shared number."""
    stage = rank // 2
    state = {f"layer{stage}": torch.full((4,), float(stage)), "step": 7}
    with pytest.raises(pt214_dcp.RanksDiffer, match="key_group= for ranks with other keys"):
        pt214_dcp.save(state, path)
    pt214_dcp.save(state, path, key_group=f"stage {stage}")
    found: dict[str, Any] = {f"layer{stage}": torch.zeros(4), "step": 0}
    pt214_dcp.load(found, path)
    assert found[f"layer{stage}"].tolist() == [stage] * 4
    assert found["step"] == 7
    bad = {f"layer{stage}": torch.full((4,), float(rank))}
    with pytest.raises(pt214_dcp.RanksDiffer, match=r"rank \d: layer. is"):
        pt214_dcp.save(bad, path, key_group=f"stage {stage}")


def test_pipeline_stages_hold_other_keys_and_load_on_one_rank(
    run_ranks: Run, tmp_path: Path
) -> None:
    run_ranks(4, stages, str(tmp_path / "c"))
    found: dict[str, Any] = {"layer0": torch.ones(4), "layer1": torch.zeros(4), "step": 0}
    pt214_dcp.load(found, tmp_path / "c")
    assert (found["layer0"].tolist(), found["layer1"].tolist()) == ([0] * 4, [1] * 4)
    with pytest.raises(pt214_dcp.StateMismatch) as caught:
        pt214_dcp.load({"layer0": torch.ones(4), "step": 0}, tmp_path / "c")
    assert caught.value.unexpected == ("layer1",)
