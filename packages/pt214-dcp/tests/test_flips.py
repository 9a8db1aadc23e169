"""A thousand flipped bits and cut files: each is noticed, with its file, key and offset."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pt214_dcp
import pytest
import torch

COUNT = int(os.environ.get("PT214_FLIPS", "1000"))


def state(fill: float | None = None) -> dict[str, Any]:
    """Twenty layers; all of ``fill``, or of numbers that are the same each time."""
    numbers = torch.Generator().manual_seed(0)
    layers = [torch.randn(30, 7, generator=numbers) for _ in range(20)]
    if fill is not None:
        layers = [torch.full_like(layer, fill) for layer in layers]
    return {f"layer{at}": {"w": layer, "n": at} for at, layer in enumerate(layers)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 20 KB in all five kinds of file."""
    path = tmp_path_factory.mktemp("flips")
    pt214_dcp.save(state(), path)
    return path


def verified(path: Path) -> None:
    """Read all that lies there."""
    pt214_dcp.verify(path)


def loaded(path: Path) -> None:
    """Read what a load needs, and compare it with what was saved."""
    found = state(fill=0.0)
    pt214_dcp.load(found, path)
    for key, layer in state().items():
        if not torch.equal(found[key]["w"], layer["w"]) or found[key]["n"] != layer["n"]:
            raise AssertionError(f"{key} came back changed")


def loaded_unchecked(path: Path) -> None:
    """The broken twin of ``loaded``: it looks at no checksum."""
    with mock.patch("pt214_dcp.data_files.DataFiles._compare"):
        loaded(path)


def noticed(path: Path, look: Callable[[Path], None] = verified) -> str:
    """What ``look`` says, or nothing."""
    try:
        look(path)
    except pt214_dcp.CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("look", [verified, loaded])
def test_every_flip_and_cut_is_noticed_and_told(
    checkpoint: Path, look: Callable[[Path], None]
) -> None:
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
        try:
            told = noticed(checkpoint, look)
        finally:
            file.write_bytes(whole)
        if not told:
            silent.append((file.name, at))
        elif file.name not in told or ("checksum" in told and "offset" not in told):
            vague.append(told)
    assert not silent
    assert not vague
    assert noticed(checkpoint) == ""


def test_a_load_that_checks_nothing_is_caught(checkpoint: Path) -> None:
    with pytest.raises(AssertionError, match="came back changed"):
        test_every_flip_and_cut_is_noticed_and_told(checkpoint, loaded_unchecked)


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
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="layer9/w at offset"):
        pt214_dcp.load(state(0.0), checkpoint)
    file.write_bytes(whole)
