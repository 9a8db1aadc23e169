"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pt214_dcp
import pytest
import torch
from pt214_dcp.__main__ import main


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    pt214_dcp.save({"w": torch.ones(2, 3), "n": 1}, tmp_path / "c")
    return str(tmp_path / "c")


def test_ls_info_and_verify_tell_what_was_saved(
    checkpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", checkpoint, "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert tensors == {"w": {"dtype": "float32", "shape": [2, 3]}}
    assert main(["info", checkpoint, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank_size_bytes"] == [120]
    assert main(["verify", checkpoint]) == 0
    assert "1 tensors" in capsys.readouterr().out


def test_ls_of_a_folder_of_steps_lists_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = pt214_dcp.Checkpointer(tmp_path)
    keeper.save(7, {"n": 1})
    keeper.wait()
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "7\n"


def test_a_damaged_or_absent_checkpoint_exits_with_one(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data,) = Path(checkpoint).glob("gen-*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    assert main(["verify", checkpoint, "--json"]) == 1
    assert "crc32c" in json.loads(capsys.readouterr().out)["errors"][0]
    assert main(["info", str(tmp_path / "none")]) == 1
    assert "NotACheckpoint" in capsys.readouterr().err
