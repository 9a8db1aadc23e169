"""Each flipped bit is noticed, by ``verify`` and by ``load``, with file, key and offset."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import data_files

FLIPS = 100  # in each kind of file


def blank() -> dict[str, Any]:
    return {"w": torch.zeros(700, 1000), "b": torch.zeros(3, dtype=torch.bfloat16), "n": 0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    state = {"w": torch.randn(700, 1000), "b": torch.ones(3, dtype=torch.bfloat16), "n": 7}
    pt214_dcp.save(state, tmp_path)
    return tmp_path


def flips(file: Path) -> list[tuple[int, int]]:
    draw = random.Random(5)
    return [(draw.randrange(file.stat().st_size), draw.randrange(8)) for _ in range(FLIPS)]


def flip(file: Path, at: int, bit: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(at)
        old = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([old ^ (1 << bit)]))


@pytest.mark.parametrize("name", ["gen-*/*.safetensors", "gen-*/*.manifest", "COMMIT.json"])
def test_a_flipped_bit_is_noticed(checkpoint: Path, name: str) -> None:
    (file,) = checkpoint.glob(name)
    for at, bit in flips(file):
        flip(file, at, bit)
        for check in (pt214_dcp.verify, lambda path: pt214_dcp.load(blank(), path)):
            with pytest.raises((pt214_dcp.ChunkCorrupt, pt214_dcp.NotACheckpoint)) as caught:
                check(checkpoint)
            assert file.name in str(caught.value)
            if file.suffix == ".data":
                assert "offset" in str(caught.value)
                assert " w " in str(caught.value) or " b " in str(caught.value)
        flip(file, at, bit)
    pt214_dcp.verify(checkpoint)


def test_a_reader_that_skips_checksums_fails_the_flip_test(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = checkpoint.glob("gen-*/*.safetensors")

    class Blind:
        """Answers what was asked for, as no checksum at all would."""

        def __ne__(self, other: object) -> bool:
            return False

    monkeypatch.setattr(data_files, "checksum", lambda data: Blind())
    flip(file, *flips(file)[0])
    pt214_dcp.verify(checkpoint)  # and so the test above, which wants an error, would fail


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
@pytest.mark.parametrize("name", ["gen-*/*.safetensors", "gen-*/*.manifest", "COMMIT.json"])
def test_a_file_of_another_length_is_noticed(checkpoint: Path, name: str, change: str) -> None:
    (file,) = checkpoint.glob(name)
    data = file.read_bytes()
    if change == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if change == "cut" else data + b"\0")
    for check in (pt214_dcp.verify, lambda path: pt214_dcp.load(blank(), path)):
        with pytest.raises((pt214_dcp.ChunkCorrupt, pt214_dcp.NotACheckpoint)):
            check(checkpoint)


def test_a_symlink_in_place_of_data_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    (file,) = checkpoint.glob("gen-*/*.safetensors")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="symbolic link"):
        pt214_dcp.load(blank(), checkpoint)


def test_verify_can_list_all_damaged_blocks(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("gen-*/*.safetensors")
    flip(file, 5, 1)
    flip(file, file.stat().st_size - 1, 1)
    assert len(pt214_dcp.verify(checkpoint, raises=False).errors) == 2
