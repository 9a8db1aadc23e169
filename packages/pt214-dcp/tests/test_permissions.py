"""What this user may not do: told with the path, and nothing is lost. Root acts as nobody here."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import files

NOBODY = 65534
PERMISSION = "Permission denied"


def state(number: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), float(number)), "step": int(number)}


def loaded(path: Path) -> int:
    found = state(0.0)
    pt214_dcp.load(found, path)
    assert bool((found["w"] == found["step"]).all())
    return int(found["step"])


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder below /tmp: pytest's own lets no other user in."""
    with tempfile.TemporaryDirectory(prefix="pt214-permissions-") as name:
        os.chmod(name, 0o777)
        try:
            yield Path(name)
        finally:
            for path in Path(name).rglob("*"):
                if path.is_dir():
                    path.chmod(0o777)


def as_nobody(call: Callable[..., None], *args: Any) -> None:
    """Run ``call`` in a process that is not root's, for whom permissions count."""

    def main() -> None:
        try:
            if os.geteuid() == 0:
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            call(*args)
        except BaseException:
            errors.put(traceback.format_exc())
            raise

    context = multiprocessing.get_context("fork")
    errors = context.Queue()
    process = context.Process(target=main)
    process.start()
    process.join(60)
    assert process.exitcode == 0, errors.get(timeout=5)


def start_python() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


@pytest.fixture(params=["save", "async_save"])
def call(request: pytest.FixtureRequest) -> str:
    """Both ways to save; the second starts a Python of its own, which nobody must be able to."""
    if request.param == "async_save":
        try:
            as_nobody(start_python)
        except AssertionError:
            pytest.skip(f"user {NOBODY} may not run {sys.executable}")
    return str(request.param)


def read_only_folder(disk: Path, call: str) -> None:
    with pytest.raises(pt214_dcp.CheckpointError, match=PERMISSION) as caught:
        getattr(pt214_dcp, call)(state(2), disk / "c").wait()
    assert f"{disk / 'c'}/gen-" in str(caught.value)
    assert loaded(disk / "c") == 1


def test_a_folder_that_may_only_be_read(disk: Path, call: str) -> None:
    pt214_dcp.save(state(1), disk / "c")
    os.chmod(disk / "c", 0o555)
    as_nobody(read_only_folder, disk, call)
    assert len(list((disk / "c").iterdir())) == 2  # record and generation: nothing else was left


def nothing_may_be_made(disk: Path) -> None:
    with pytest.raises(pt214_dcp.CheckpointError, match=PERMISSION) as caught:
        pt214_dcp.save(state(2), disk / "shut" / "new")
    assert str(disk / "shut") in str(caught.value)


def test_a_parent_that_may_only_be_read(disk: Path) -> None:
    (disk / "shut").mkdir(mode=0o555)
    os.chmod(disk / "shut", 0o555)
    as_nobody(nothing_may_be_made, disk)
    assert not list((disk / "shut").iterdir())


def lost_midway(disk: Path, call: str) -> None:
    """The folder may be written when the save begins, and no longer when its files are there."""
    path = disk / "c"
    pt214_dcp.save(state(1), path)
    writes, done = files.write_new, []

    def write(target: Path, *args: Any, **more: Any) -> Any:
        found = writes(target, *args, **more)
        done.append(target)
        for folder in (path, *path.glob("gen-*")):
            os.chmod(folder, 0o555)
        return found

    module: Any = files
    module.write_new = write
    with pytest.raises(pt214_dcp.SaveFailed, match=PERMISSION) as caught:
        getattr(pt214_dcp, call)(state(2), path).wait()
    assert done
    assert str(path) in str(caught.value)
    assert loaded(path) == 1
    for folder in (path, *path.glob("gen-*")):
        os.chmod(folder, 0o755)
    module.write_new = writes
    getattr(pt214_dcp, call)(state(3), path).wait()
    assert loaded(path) == 3


def test_permission_lost_midway(disk: Path, call: str) -> None:
    as_nobody(lost_midway, disk, call)


def may_not_read(disk: Path, file: str) -> None:
    found = state(0.0)
    with pytest.raises((pt214_dcp.CheckpointError, PermissionError), match=PERMISSION) as caught:
        pt214_dcp.load(found, disk)
    assert file in str(caught.value)
    assert not found["w"].any()


@pytest.mark.parametrize("suffix", ["safetensors", "manifest", "COMMIT.json"])
def test_a_file_that_may_not_be_read(disk: Path, suffix: str) -> None:
    pt214_dcp.save(state(1), disk)
    found = [file for file in disk.rglob("*") if file.is_file() and suffix in file.name]
    assert found
    for file in found:
        os.chmod(file, 0o000)
    as_nobody(may_not_read, disk, found[0].name)


def test_a_loader_that_ignores_permissions_is_caught(disk: Path) -> None:
    """The twin: files may be read, so the check for an error must fail."""
    pt214_dcp.save(state(1), disk)
    with pytest.raises(AssertionError, match="DID NOT RAISE"):
        as_nobody(may_not_read, disk, "COMMIT.json")
