"""A state dict read without one to fill, and targets of ``convert`` that appear whole or not."""

from __future__ import annotations

from pathlib import Path

import pt214_dcp
import pytest
import torch
from pt214_dcp.interop import convert as converting
from pt214_dcp.interop.target import appearing


def test_read_gives_what_was_saved_and_ties_what_was_tied(tmp_path: Path) -> None:
    weight = torch.randn(30, 4)
    state = {"a": weight, "b": [weight, {3: None}], "view": weight[:2], "t": (1, 2.5, "x")}
    pt214_dcp.save(state, tmp_path)
    found = pt214_dcp.read(tmp_path)
    assert torch.equal(found["a"], weight)
    assert found["a"] is found["b"][0]
    assert torch.equal(found["view"], weight[:2])
    assert (found["b"][1], found["t"]) == ({3: None}, (1, 2.5, "x"))


def test_read_refuses_what_belongs_to_one_rank(tmp_path: Path) -> None:
    pt214_dcp.save({"w": torch.ones(1), "rng": pt214_dcp.PerRank(1)}, tmp_path)
    with pytest.raises(pt214_dcp.LoadFailed, match=r"PerRank values.*: rng"):
        pt214_dcp.read(tmp_path)
    with pytest.raises(pt214_dcp.LoadFailed, match="PerRank"):
        pt214_dcp.convert(tmp_path, tmp_path / "a.pt", to="torch")
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize("to", ["torch", "stock", "safetensors"])
def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pt214_dcp.save({"w": torch.ones(100)}, tmp_path / "a")
    name = "write_folder" if to == "safetensors" else "_write"
    write = getattr(converting, name)

    def fails(*args: object, **kwargs: object) -> None:
        write(*args, **kwargs)
        raise OSError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(converting, name, fails)
        with pytest.raises(OSError, match="no more"):
            pt214_dcp.convert(tmp_path / "a", tmp_path / "out" / "b", to=to)
    assert list((tmp_path / "out").iterdir()) == []
    pt214_dcp.convert(tmp_path / "a", tmp_path / "out" / "b", to=to)
    pt214_dcp.convert(tmp_path / "out" / "b", tmp_path / "back")
    assert torch.equal(pt214_dcp.read(tmp_path / "back")["w"], torch.ones(100))


def test_a_target_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for taken in (tmp_path / "full", tmp_path / "full" / "x"):
        with pytest.raises(pt214_dcp.BadPath, match="something lies here"), appearing(taken):
            pass
    with appearing(tmp_path / "new") as part:
        part.mkdir()
        (part / "file").write_text("x")
        assert not (tmp_path / "new").exists()
    assert (tmp_path / "new" / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "new"]
