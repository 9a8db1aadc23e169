"""A thousand flipped bits and cut files: each is noticed, with its file, key and offset."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pt214_dcp
import pytest
import torch

COUNT = int(os.environ.get("PT214_FLIPS", "1000"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 KB in all five kinds of file."""
    path = tmp_path_factory.mktemp("flips")
    state = {f"layer{at}": {"w": torch.randn(30, 7), "n": at} for at in range(20)}
    pt214_dcp.save(state, path)
    return path


def noticed(path: Path) -> str:
    """What ``verify`` says, or nothing."""
    try:
        pt214_dcp.verify(path)
    except pt214_dcp.CheckpointError as error:
        return str(error)
    return ""


def test_every_flip_and_cut_is_noticed_and_told(checkpoint: Path) -> None:
    files = sorted(file for file in checkpoint.rglob("*") if file.is_file())
    assert len(files) == 5
    chance, silent, vague = random.Random(0), [], []
    for turn in range(COUNT):
        file = files[turn % len(files)]
        whole = file.read_bytes()
        at = chance.randrange(len(whole))
        data = bytearray(whole)
        if turn % 10 == 9:
            del data[at:]
        else:
            data[at] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
        told = noticed(checkpoint)
        file.write_bytes(whole)
        if not told:
            silent.append((file.name, at))
        elif file.name not in told or ("checksum" in told and "offset" not in told):
            vague.append(told)
    assert not silent
    assert not vague
    assert noticed(checkpoint) == ""


def test_a_flip_of_data_is_told_with_key_and_offset(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("gen-*/*.safetensors")
    whole = file.read_bytes()
    data = bytearray(whole)
    data[-1] ^= 1
    file.write_bytes(data)
    told = noticed(checkpoint)
    file.write_bytes(whole)
    offset = len(whole) - 30 * 7 * 4
    assert f"{file}: layer9/w at offset {offset}: expected checksum" in told


def test_a_load_stops_at_a_flip_too(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("gen-*/*.safetensors")
    whole = file.read_bytes()
    data = bytearray(whole)
    data[-1] ^= 1
    file.write_bytes(data)
    state = {f"layer{at}": {"w": torch.zeros(30, 7), "n": 0} for at in range(20)}
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="layer9/w at offset"):
        pt214_dcp.load(state, checkpoint)
    file.write_bytes(whole)
