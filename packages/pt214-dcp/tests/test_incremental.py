"""Blocks that did not change are linked, not written; and no checkpoint leans on another."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import blocks, incremental

MIB = 1 << 20


def state(step: int) -> dict[str, Any]:
    """16 MiB that stand still, 2 MiB that change."""
    torch.manual_seed(0)
    found: dict[str, Any] = {f"frozen{at}": torch.randn(MIB) for at in range(4)}
    return found | {"adapter": torch.full((MIB // 2,), float(step)), "step": step}


def check(path: Path, step: int) -> None:
    found: dict[str, Any] = {
        key: torch.zeros_like(v) if key != "step" else 0 for key, v in state(0).items()
    }
    pt214_dcp.load(found, path)
    wanted = state(step)
    assert found.pop("step") == wanted.pop("step")
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    pt214_dcp.verify(path)


def test_a_step_writes_only_what_changed(tmp_path: Path) -> None:
    full = pt214_dcp.save(state(0), tmp_path / "0", hashes=True)
    for save in (pt214_dcp.save, pt214_dcp.async_save):
        handle = save(state(1), tmp_path / "1", base=tmp_path / "0")
        handle.wait()
        assert full.size_bytes is not None
        assert handle.size_bytes is not None
        assert handle.size_bytes <= 0.12 * full.size_bytes
        check(tmp_path / "1", 1)


def test_a_base_may_be_removed(tmp_path: Path) -> None:
    pt214_dcp.save(state(0), tmp_path / "0", hashes=True)
    for step in range(1, 4):
        pt214_dcp.save(state(step), tmp_path / str(step), base=tmp_path / str(step - 1))
        shutil.rmtree(tmp_path / str(step - 1))
        check(tmp_path / str(step), step)


def test_a_checkpoint_can_be_its_own_base(tmp_path: Path) -> None:
    pt214_dcp.save(state(0), tmp_path, hashes=True)
    for step in range(1, 3):
        handle = pt214_dcp.save(state(step), tmp_path, base=tmp_path)
        assert handle.size_bytes is not None
        assert handle.size_bytes < 3 * MIB
        check(tmp_path, step)
    assert len(list(tmp_path.glob("gen-*"))) == 1


def test_a_base_without_hashes_or_without_a_checkpoint_means_a_full_save(tmp_path: Path) -> None:
    pt214_dcp.save(state(0), tmp_path / "0")
    for base in ("0", "none"):
        handle = pt214_dcp.save(state(1), tmp_path / "1", base=tmp_path / base)
        assert handle.size_bytes is not None
        assert handle.size_bytes > 17 * MIB
        check(tmp_path / "1", 1)


def test_a_long_chain_is_ended_by_a_full_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incremental, "MOST_FILES", 2)
    tensors = {f"w{at}": torch.randn(MIB // 4) for at in range(6)}
    sizes = []
    for step in range(6):
        tensors[f"w{step}"].fill_(step)  # so each file holds what a later step still wants
        base = tmp_path if step else None
        handle = pt214_dcp.save(tensors, tmp_path, hashes=True, base=base)
        sizes.append((handle.size_bytes or 0) > 5 * MIB)
        found = {key: torch.zeros_like(value) for key, value in tensors.items()}
        pt214_dcp.load(found, tmp_path)
        assert all(torch.equal(found[key], tensors[key]) for key in tensors)
    assert sizes == [True, False, False, True, False, False]


def test_a_hash_that_sees_no_change_fails_the_step_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "digest", lambda data: bytes([len(data) % 251] * 16))
    pt214_dcp.save(state(0), tmp_path / "0", hashes=True)
    pt214_dcp.save(state(1), tmp_path / "1", base=tmp_path / "0")
    with pytest.raises((pt214_dcp.ChunkCorrupt, AssertionError)):
        check(tmp_path / "1", 1)


def test_the_checkpointer_saves_in_full_once_in_a_while(tmp_path: Path) -> None:
    checkpoints = pt214_dcp.Checkpointer(tmp_path, keep=2, full_every=3)
    sizes = []
    for step in range(5):
        handle = checkpoints.save(step, state(step))
        assert handle is not None
        handle.wait()
        sizes.append((handle.size_bytes or 0) > 17 * MIB)
    assert sizes == [True, False, False, True, False]
    assert checkpoints.steps() == [3, 4]
    for step in (3, 4):
        check(Path(str(checkpoints.path(step))), step)
