"""A disk that fails or writes less, at each call of a save: told, and the old checkpoint stays.

``disk_faults.c`` is loaded before libc into one process, which forks a saver for each fault.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch

SHIM = Path(__file__).parent / "disk_faults.c"
FORKING = """
import json, os, sys
import torch, pt214_dcp
state = {"a": torch.full((400_000,), 2.0), "b": torch.full((9,), 2.0), "step": 2}
for case in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        os.environ.update(case["fault"])
        try:
            getattr(pt214_dcp, case["how"])(state, case["path"]).wait()
            told, code = "", 0
        except pt214_dcp.SaveFailed as error:
            told, code = str(error), 3
        with open(case["path"] + ".told", "w") as stream:
            stream.write(told)
        os._exit(code)
    _, status = os.waitpid(pid, 0)
    case["code"] = os.waitstatus_to_exitcode(status)
    case["told"] = open(case["path"] + ".told").read()
    print(json.dumps(case), flush=True)
"""
KINDS = {"EIO write": ("write", errno.EIO), "ENOSPC write": ("write", errno.ENOSPC),
         "EIO fsync": ("fsync", errno.EIO), "short write": ("write", 0)}  # fmt: skip
MOMENTS = range(1, 12)  # beyond the last call of a save the fault never comes
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="no C compiler, or no Linux"
)
Case = dict[str, Any]


def state(step: int) -> dict[str, Any]:
    return {"a": torch.full((400_000,), float(step)), "b": torch.full((9,), float(step)),
            "step": step}  # fmt: skip


def loaded(path: str) -> int:
    """The one step whose values are in all tensors."""
    found = state(0)
    pt214_dcp.load(found, path)
    step = int(found["step"])
    assert bool((found["a"] == step).all())
    assert bool((found["b"] == step).all())
    return step


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Every kind of fault at every moment of both ways to save, over an old checkpoint."""
    folder = tmp_path_factory.mktemp("disk")
    shim = folder / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, SHIM, "-ldl"], check=True)
    old = folder / "old"
    pt214_dcp.save(state(1), old)
    asked: list[Case] = []
    for kind, at, how in itertools.product(KINDS, MOMENTS, ("save", "async_save")):
        path = folder / f"{kind} {at} {how}"
        shutil.copytree(old, path)
        call, code = KINDS[kind]
        fault = {"FAULT_CALL": call, "FAULT_AT": str(at), "FAULT_ERRNO": str(code)}
        asked.append({"kind": kind, "at": at, "how": how, "path": str(path), "fault": fault})
    env = {**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", FORKING, json.dumps(asked)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(asked), done.stderr
    return answers


def test_a_failing_disk_is_told_and_loses_nothing(cases: list[Case]) -> None:
    failed = [case for case in cases if case["code"]]
    for case in failed:
        _, code = KINDS[case["kind"]]
        assert os.strerror(code) in case["told"], case
        assert loaded(case["path"]) in (1, 2), case
        pt214_dcp.save(state(3), case["path"])
        assert loaded(case["path"]) == 3
    for kind in ("EIO write", "ENOSPC write", "EIO fsync"):
        moments = {(case["at"], case["how"]) for case in failed if case["kind"] == kind}
        assert {(1, "save"), (1, "async_save"), (4, "save"), (4, "async_save")} <= moments


def test_a_save_that_says_it_worked_did(cases: list[Case]) -> None:
    well = [case for case in cases if not case["code"]]
    assert all(loaded(case["path"]) == 2 for case in well)
    for kind in KINDS:  # beyond the last call there is nothing to fail
        assert any(case["kind"] == kind for case in well)


def test_a_short_write_is_finished(cases: list[Case]) -> None:
    short = [case for case in cases if case["kind"] == "short write"]
    assert [case["told"] for case in short] == [""] * len(short)
    for case in short:
        pt214_dcp.verify(case["path"])
        assert loaded(case["path"]) == 2
