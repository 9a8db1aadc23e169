"""What the command line prints and how it ends: true distances, valid JSON, no traceback."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp.__main__ import COMMANDS, main

Told = Callable[..., tuple[int, Any]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Run a command with --json; its exit status and its object."""

    def run(*words: object) -> tuple[int, Any]:
        status = main([*map(str, words), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_diff_measures_only_elements_that_differ(tmp_path: Path, told: Told) -> None:
    inf, nan, big = float("inf"), float("nan"), 2**63 - 1
    old = {"mask": torch.tensor([-inf, nan, 1.0, 2.0]), "n": torch.tensor([big, 2**60, 5])}
    new = {"mask": torch.tensor([-inf, nan, 1.0, 3.0]), "n": torch.tensor([-big - 1, 2**60, 6])}
    new["flag"], old["flag"] = torch.tensor(True), torch.tensor(False)
    pt214_dcp.save(old, tmp_path / "a")
    pt214_dcp.save(new, tmp_path / "b")
    found = {row["key"]: row for row in told("diff", tmp_path / "a", tmp_path / "b")[1]["tensors"]}
    assert (found["mask"]["unequal_elements"], found["mask"]["max_absolute"]) == (1, 1)
    assert found["mask"]["max_relative"] == pytest.approx(1 / 3)
    assert (found["n"]["unequal_elements"], found["n"]["max_absolute"]) == (2, 2**64 - 1)
    assert found["flag"] == {"key": "flag", "unequal_elements": 1, "first_index": []}


def test_json_holds_no_number_that_json_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pt214_dcp.save({"w": torch.tensor([float("nan"), float("-inf"), 1.0])}, tmp_path)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert main(["cat", str(tmp_path), "w", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert facts["values"] == ["nan", "-inf", 1]


def test_a_reader_that_has_enough_meets_no_traceback(tmp_path: Path) -> None:
    pt214_dcp.save({f"key{at:05d}": torch.ones(1) for at in range(5000)}, tmp_path)
    words = [sys.executable, "-W", "ignore", "-m", "pt214_dcp", "ls", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert b"key00000" in process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_an_interrupt_exits_with_130_and_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    pt214_dcp.save({"w": torch.ones(3)}, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pt214_dcp.commit.commit", interrupt)
        assert main(["compact", str(tmp_path)]) == 130
    assert len(list(tmp_path.glob("gen-*"))) == 1
    assert told("verify", tmp_path)[0] == 0


@pytest.mark.parametrize(("name", "error"), [("save", "NotACheckpoint"), ("load", "OSError")])
def test_bench_tells_no_times_of_a_save_or_load_that_does_nothing(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch, name: str, error: str
) -> None:
    monkeypatch.setattr(f"pt214_dcp.cli.bench.{name}", lambda *_: None)
    if name == "save":  # nor may the asynchronous save stand in for it
        idle = SimpleNamespace(wait=lambda: None, blocked_s=1.0)
        monkeypatch.setattr("pt214_dcp.cli.bench.async_save", lambda *_: idle)
    status, facts = told("bench", tmp_path, "--mib", 16, "--rounds", 1)
    assert (status, facts["error"]) == (1, error)
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_the_command_line_has_every_command_with_its_options() -> None:
    page = Path(__file__).parents[3] / "docs" / "dcp-cli.md"
    rows = re.findall(r"^\| `(\w+) (.*?)` \|", page.read_text(), re.M)
    told = {name: set(re.findall(r"--[\w-]+", words)) for name, words in rows}
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser(add_help=False)
        command.add(parser)
        options = {text for action in parser._actions for text in action.option_strings}
        assert told[name] == options, name
