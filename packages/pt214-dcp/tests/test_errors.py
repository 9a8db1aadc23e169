"""Bad input and full disks: clear words, nothing half-written, the old checkpoint kept."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import files, rank_files

MIB = 1 << 20


def freed() -> torch.Tensor:
    tensor = torch.ones(8)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the prototype that it is
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def refused() -> dict[str, tuple[Any, str]]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return {
        "function": (print, "builtin_function_or_method is not data"),
        "set": ({1}, "a set is not data"),
        "module": (torch.nn.Linear(1, 1), "Linear is not data"),
        "sparse": (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
        "meta": (torch.empty(1, device="meta"), "meta device"),
        "nested": (nested(), "a nested tensor"),
        "freed": (freed(), "storage was freed, as fully_shard does"),
        "dtype": (torch.float32, "dtype is not data"),
        "key": ({(1, 2): 3}, r"key \(1, 2\) is a tuple; use str or int"),
        "bool key": ({True: 3}, "key True is a bool"),
        "surrogate key": ({"\ud800": 3}, r"is no valid Unicode; use another text"),
        "cycle": (cycle, "contains itself"),
    }


@pytest.mark.parametrize("name", refused())
def test_what_is_not_data_is_refused_by_the_path_of_its_key(tmp_path: Path, name: str) -> None:
    value, words = refused()[name]
    with pytest.raises(pt214_dcp.NotData, match=words) as caught:
        pt214_dcp.save({"model": {"x": [0, value]}}, tmp_path / "c")
    assert "model/x/[1]" in str(caught.value)
    assert not (tmp_path / "c").exists()


def test_a_tensor_inside_a_transform_is_refused(tmp_path: Path) -> None:
    def inside(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(pt214_dcp.NotData, match=r"^a/x: .*inside torch.func.vmap"):
            pt214_dcp.save({"a": {"x": tensor}}, tmp_path / "c")
        return tensor * 2

    assert torch.func.vmap(inside)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
    assert not (tmp_path / "c").exists()


def test_a_state_dict_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pt214_dcp.NotData, match="state_dict is a list; a dict is needed"):
        pt214_dcp.save([1], tmp_path)  # type: ignore[arg-type]


def test_a_path_that_is_a_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(pt214_dcp.BadPath, match="is not a folder"):
            pt214_dcp.async_save({"n": 1}, path)
        with pytest.raises(pt214_dcp.NotACheckpoint):
            pt214_dcp.load({"n": 1}, path)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_without_a_commit_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(pt214_dcp.NotACheckpoint, match="nothing was ever committed"):
        pt214_dcp.load({"n": 1}, tmp_path)


def test_a_record_of_another_format_or_version_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "COMMIT.json").write_bytes(files.pack({"format": "other"}))
    with pytest.raises(pt214_dcp.NotACheckpoint, match="another format"):
        pt214_dcp.load({"n": 1}, tmp_path)
    (tmp_path / "COMMIT.json").write_bytes(files.pack({"format": "pt214-dcp", "version": 99}))
    with pytest.raises(pt214_dcp.NotACheckpoint, match="version 99; this release reads 1"):
        pt214_dcp.load({"n": 1}, tmp_path)


def test_a_commit_that_names_another_folder_is_refused(tmp_path: Path) -> None:
    body = {"format": "pt214-dcp", "version": 1, "generation": "../elsewhere"}
    body |= {"tables": [[1, "00" * 16]], "pages": ["00" * 16], "world_size": 1, "size_bytes": 1}
    (tmp_path / "COMMIT.json").write_bytes(files.pack(body))
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=r"'\.\./elsewhere'"):
        pt214_dcp.load({"n": 1}, tmp_path)


@pytest.mark.parametrize("number", [0, -1.0, float("nan")])
def test_a_timeout_that_is_not_above_zero_is_refused(tmp_path: Path, number: float) -> None:
    with pytest.raises(ValueError, match=r"timeout_s is .*; it must be above 0"):
        pt214_dcp.save({"n": 1}, tmp_path, timeout_s=number)


def assert_old_stays(path: Path, save: Callable[[], object], words: str) -> None:
    pt214_dcp.save({"w": torch.ones(1000)}, path)
    with pytest.raises(pt214_dcp.SaveFailed, match=words):
        save()
    state = {"w": torch.zeros(1000)}
    pt214_dcp.load(state, path)
    assert bool((state["w"] == 1).all())
    assert len(list(path.glob("gen-*"))) == 1


def big(path: Path) -> Callable[[], object]:
    return lambda: pt214_dcp.save({"w": torch.zeros(2 * MIB)}, path)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_says_so_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this container may not mount a small disk")
    try:
        words = r"No space left on device: this rank needs 8388608 bytes, \d+ are free"
        assert_old_stays(tmp_path / "c", big(tmp_path / "c"), words)
        with pytest.MonkeyPatch.context() as patch:  # a disk that fills up while it is written
            patch.setattr(rank_files, "_check_room", lambda folder, needed: None)
            assert_old_stays(tmp_path / "c", big(tmp_path / "c"), "No space left on device")
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_size_limit_says_so_and_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    import signal

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            big(tmp_path)()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    try:
        assert_old_stays(tmp_path, limited, r"File too large: this rank needs \d+ bytes")
    finally:
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EIO])
def test_what_the_disk_answers_is_told_and_the_old_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The answer is simulated: as root, modes of a folder stop nobody."""

    def refuse(path: Path, *rest: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    def save() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(files, "write_new", refuse)
            pt214_dcp.save({"w": torch.zeros(1000)}, tmp_path)

    assert_old_stays(tmp_path, save, os.strerror(code))


def test_a_state_dict_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for _ in range(5000):
        state = {"below": state}
    with pytest.raises(pt214_dcp.NotData, match="nested too deeply"):
        pt214_dcp.save(state, tmp_path / "c")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_a_path_that_no_file_system_takes_is_refused_at_once(tmp_path: Path, name: str) -> None:
    for save in (pt214_dcp.save, pt214_dcp.async_save):
        with pytest.raises(pt214_dcp.BadPath, match="can't be a folder"):
            save({"w": torch.ones(1)}, f"{tmp_path}/{name}")


def test_a_save_whose_tidying_fails_still_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("tidying")

    monkeypatch.setattr("pt214_dcp.saver.write_rank", fail)
    monkeypatch.setattr("pt214_dcp.saver._Save._failed", fail)
    monkeypatch.setattr("threading.excepthook", lambda arguments: None)
    handle = pt214_dcp.async_save({"w": torch.ones(1)}, tmp_path)
    assert handle.exception(timeout_s=20) is not None


def test_a_refused_save_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_files, "_free_bytes", lambda folder: 3)
    with pytest.raises(pt214_dcp.SaveFailed, match="3 are free"):
        pt214_dcp.save({"w": torch.ones(10)}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_empty_keys_are_keys(tmp_path: Path) -> None:
    state = {"": torch.ones(2), "a": {"": torch.ones(3), "b": 1}, "n": {"": 4}}
    pt214_dcp.save(state, tmp_path)
    assert pt214_dcp.verify(tmp_path).tensors == 2
    found: dict[str, Any] = {"": torch.zeros(2), "a": {"": torch.zeros(3), "b": 0}, "n": {"": 0}}
    pt214_dcp.load(found, tmp_path)
    assert found[""].tolist() == [1, 1]
    assert found["a"][""].tolist() == [1, 1, 1]
    assert found["n"][""] == 4
