"""The order that makes a commit durable, seen by strace, and what twins of it break.

data and manifest fsynced -> folders fsynced -> record fsynced -> rename -> folder fsynced
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pt214_dcp
import pytest
import torch

SAVER = """
import sys, torch, pt214_dcp
from pt214_dcp import commit, files
twin = sys.argv[2]
if twin == "no fsync":
    files.os = type("Os", (), {**vars(files.os), "fsync": staticmethod(lambda fd: None)})
if twin == "commit first":
    from pt214_dcp import saver as save
    ready = save.write_rank
    def early(folder, *rest):
        folder.mkdir(parents=True)
        (folder.parent / "COMMIT.json.x").write_text("{}")
        files.os.rename(folder.parent / "COMMIT.json.x", folder.parent / "COMMIT.json")
        return ready(folder, *rest)
    save.write_rank = early
if twin == "nothing":
    pt214_dcp.save = lambda state, path: None
pt214_dcp.save({"w": torch.ones(1000)}, sys.argv[1])
"""
OPENS = "openat,open,creat,rename,renameat,renameat2,unlink,unlinkat"
CALLS = f"{OPENS},fsync,fdatasync,pwrite64,pwritev,pwritev2,write"
needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="no strace on this machine"
)


def events(path: Path, log: Path, twin: str) -> list[str]:
    """The calls that touch ``path``, as ``write data``, ``fsync folder``, ``rename commit``..."""
    command = ["strace", "-f", "-y", "-e", f"trace={CALLS}", "-o", str(log)]
    subprocess.run(
        [*command, sys.executable, "-W", "ignore", "-c", SAVER, str(path), twin], check=True
    )
    found = []
    for line in log.read_text().splitlines():
        match = re.search(r"(\w+)\((.*)", line)
        if match is None or str(path) not in line or ("<unfinished" in line and "rename" in line):
            continue
        call, rest = match[1].removesuffix("64"), match[2]
        if call.startswith("rename"):
            found.append("rename commit")
        elif call in ("fsync", "fdatasync", "pwrite", "pwritev", "pwritev2", "write"):
            found.append(f"{call.rstrip('v2')} {_kind(rest, path)}")
        elif call.startswith("open") and re.search(r"O_(WRONLY|RDWR)", rest):
            found.append("create" if "O_EXCL" in rest else "open for writing")
    return found


def _kind(rest: str, path: Path) -> str:
    match = re.search(r"<([^>]*)>", rest)
    name = Path(match[1]) if match else Path()
    if name == path:
        return "folder"
    if name.suffix in (".safetensors", ".manifest"):
        return "data" if name.suffix == ".safetensors" else "manifest"
    if name.name in ("index", "table-00000"):
        return name.name
    return "generation" if name.name.startswith("gen-") else "commit"


def is_durable(calls: list[str]) -> bool:
    """Whether all that the commit names was on the disk before the rename, and the rename after."""
    if "rename commit" not in calls or "open for writing" in calls:
        return False
    at = calls.index("rename commit")
    before, after = calls[:at], calls[at:]
    for kind in ("data", "manifest", "table-00000", "index", "commit"):
        if f"fsync {kind}" not in before:
            return False
        last = max(i for i, call in enumerate(calls) if call == f"pwrite {kind}")
        if last > before.index(f"fsync {kind}"):
            return False
    if "fsync generation" not in before or "fsync folder" not in before:
        return False
    return before.index("fsync generation") > before.index("fsync data") and "fsync folder" in after


@needs_strace
def test_all_that_a_commit_names_is_on_disk_before_the_rename(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for name in ("new", "replacing"):
        calls = events(path, tmp_path / name, "none")
        assert is_durable(calls), calls


@needs_strace
@pytest.mark.parametrize("twin", ["no fsync", "commit first", "nothing"])
def test_a_broken_twin_fails_the_order_test(tmp_path: Path, twin: str) -> None:
    assert not is_durable(events(tmp_path / "checkpoint", tmp_path / "log", twin))


def test_the_replaced_generation_is_removed(tmp_path: Path) -> None:
    for step in range(3):
        pt214_dcp.save({"w": torch.full((9,), float(step))}, tmp_path)
        assert len(list(tmp_path.glob("gen-*"))) == 1
    assert sorted(path.name[:4] for path in tmp_path.iterdir()) == ["COMM", "gen-"]
