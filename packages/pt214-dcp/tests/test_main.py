"""The command line: what each command tells, in words and in JSON, and with which exit status."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp.__main__ import COMMANDS, main
from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.rewrite import rewrite

MIB = 1 << 20
Told = Callable[..., tuple[int, Any]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    pt214_dcp.save({"w": torch.arange(6.0).view(2, 3), "step": 7}, tmp_path / "c")
    return str(tmp_path / "c")


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Told:
    """Run a command with --json; its exit status and its object."""

    def run(*words: object) -> tuple[int, Any]:
        status = main([*map(str, words), "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leftovers of these tests have no saver to wait for."""
    monkeypatch.setattr("pt214_dcp.leftovers.WATCH_S", 0.1)


def test_ls_info_and_verify_tell_what_was_saved(checkpoint: str, told: Told) -> None:
    tensors = {"w": {"dtype": "float32", "shape": [2, 3]}}
    assert told("ls", checkpoint) == (0, {"tensors": tensors})
    status, facts = told("info", checkpoint)
    assert (status, facts["ranks"], facts["values"]) == (0, 1, {"step": "7"})
    assert told("verify", checkpoint)[1]["errors"] == []


def test_every_command_has_help_that_names_the_exit_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert "Exit status: 0 well" in capsys.readouterr().out


def test_ls_of_a_folder_of_steps_lists_them(tmp_path: Path, told: Told) -> None:
    checkpoints = pt214_dcp.Checkpointer(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.ones(2)})
    checkpoints.wait()
    assert [row["step"] for row in told("ls", tmp_path)[1]["steps"]] == [1, 2]


def test_a_damaged_or_absent_checkpoint_exits_with_one(
    checkpoint: str, tmp_path: Path, told: Told
) -> None:
    (data,) = Path(checkpoint).glob("gen-*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    status, facts = told("verify", checkpoint)
    assert status == 1
    assert "checksum" in facts["errors"][0]
    assert told("info", tmp_path / "none") == (
        1,
        {
            "error": "NotACheckpoint",
            "message": f"{tmp_path}/none: no COMMIT.json here, so nothing was ever committed",
        },
    )


def test_errors_go_to_stderr_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("NotACheckpoint: ")
    assert len(captured.err.splitlines()) == 1


def test_cat_shows_values_and_parts(checkpoint: str, told: Told) -> None:
    assert told("cat", checkpoint, "step")[1]["value"] == "7"
    assert told("cat", checkpoint, "w")[1]["values"] == [[0, 1, 2], [3, 4, 5]]
    assert told("cat", checkpoint, "w", "--slice", "1,0:2")[1]["values"] == [[3, 4]]
    assert told("cat", checkpoint, "w", "--slice=-1")[1]["values"] == [[3, 4, 5]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cat", "v"], "key is 'v'; the checkpoint has none of that name"),
        (["cat", "w", "--slice", "0,0,0"], "has 3 dims; the tensor has (2, 3)"),
        (["cat", "w", "--slice", "x"], "'x' is no index or range"),
        (["cat", "w", "--slice", "5:"], "'5:' holds nothing of 2"),
        (["prune", "--keep", "0"], "--keep is 0; it must be 1 or more"),
        (["reshard", "x", "--ranks", "0"], "ranks is 0; it must be 1 or more"),
    ],
)
def test_wrong_usage_exits_with_two(
    checkpoint: str, told: Told, words: list[str], message: str
) -> None:
    status, facts = told(words[0], checkpoint, *words[1:])
    assert status == 2
    assert message in facts["message"]


def test_diff_tells_keys_kinds_values_and_how_far_tensors_lie_apart(
    checkpoint: str, tmp_path: Path, told: Told
) -> None:
    assert told("diff", checkpoint, checkpoint)[:1] == (0,)
    other = torch.arange(6.0).view(2, 3)
    other[1, 2] += 1
    pt214_dcp.save({"w": other, "step": 8, "new": torch.ones(1)}, tmp_path / "d")
    status, facts = told("diff", checkpoint, tmp_path / "d")
    assert status == 1
    assert facts["differences"][:2] == ["only in B: new", "step: 7 in A, 8 in B"]
    (found,) = facts["tensors"]
    assert (found["unequal_elements"], found["first_index"]) == (1, [1, 2])
    assert found["max_absolute"] == 1
    assert found["max_relative"] == pytest.approx(1 / 6)


def test_prune_keeps_the_newest_and_every_so_many(tmp_path: Path, told: Told) -> None:
    checkpoints = pt214_dcp.Checkpointer(tmp_path, keep=None)
    for step in range(6):
        checkpoints.save(step, {"w": torch.ones(2)})
    checkpoints.wait()
    words = ("prune", tmp_path, "--keep", 2, "--every", 3)
    assert told(*words, "--dry-run")[1]["removed"] == [1, 2]
    assert checkpoints.steps() == list(range(6))
    assert told(*words)[1]["kept"] == [0, 3, 4, 5]
    assert checkpoints.steps() == [0, 3, 4, 5]


def leave_leftovers(path: Path) -> list[Path]:
    """What a killed saver may leave, changed an hour ago."""
    folder = path / ("gen-" + "ab" * 16)
    folder.mkdir(parents=True)
    (folder / "rank-00000.safetensors").write_bytes(b"half")
    record = path / ("COMMIT.json.gen-" + "cd" * 16)
    record.write_bytes(b"{")
    left = [record, folder / "rank-00000.safetensors", folder]
    for each in left:
        os.utime(each, (time.time() - 3600,) * 2)
    return [record, folder]


@pytest.mark.usefixtures("short_watch")
def test_repair_removes_what_no_record_names_and_nothing_else(checkpoint: str, told: Told) -> None:
    left = leave_leftovers(Path(checkpoint))
    (Path(checkpoint) / "notes.txt").write_text("mine")
    removed = sorted(map(str, left))
    assert told("repair", checkpoint, "--dry-run")[1]["removed"] == removed
    assert all(each.exists() for each in left)
    status, facts = told("repair", checkpoint)
    assert (status, facts["removed"]) == (0, removed)
    assert not any(each.exists() for each in left)
    assert (Path(checkpoint) / "notes.txt").exists()
    assert told("verify", checkpoint)[0] == 0
    assert told("repair", checkpoint)[1]["removed"] == []


@pytest.mark.usefixtures("short_watch")
def test_repair_leaves_alone_what_a_saver_may_still_write(checkpoint: str, told: Told) -> None:
    record, folder = leave_leftovers(Path(checkpoint))
    (folder / "rank-00001.safetensors").write_bytes(b"now")
    facts = told("repair", checkpoint)[1]
    assert facts["removed"] == [str(record)]
    assert "its saver may still write" in facts["kept"][str(folder)]
    assert told("repair", checkpoint, "--quiet-s", 0)[1]["removed"] == [str(folder)]


def test_repair_touches_nothing_where_the_root_is_damaged(checkpoint: str, told: Told) -> None:
    left = leave_leftovers(Path(checkpoint))
    (Path(checkpoint) / "COMMIT.json").write_bytes(b"garbage")
    assert told("repair", checkpoint)[1]["error"] == "ChunkCorrupt"
    assert all(each.exists() for each in left)


def test_a_repair_that_forgets_what_is_named_fails_the_repair_test(
    checkpoint: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pt214_dcp.leftovers.named", lambda path: None)
    told("repair", checkpoint, "--quiet-s", 0)
    monkeypatch.undo()
    assert told("verify", checkpoint)[0] == 1  # and so the test above, which wants 0, would fail


def test_compact_drops_dead_blocks_and_keeps_every_bit(tmp_path: Path, told: Told) -> None:
    state: dict[str, Any] = {f"w{at}": torch.randn(MIB) for at in range(4)}
    state |= {"own": pt214_dcp.PerRank(torch.arange(5)), "step": 0}
    pt214_dcp.save(state, tmp_path, hashes=True)
    for at in range(3):
        state[f"w{at}"] = torch.randn(MIB)
        pt214_dcp.save(state, tmp_path, base=tmp_path)
    assert told("info", tmp_path)[1]["linked_bytes"] > 0
    facts = told("compact", tmp_path)[1]
    assert facts["after_bytes"] < 0.7 * facts["before_bytes"]
    assert told("info", tmp_path)[1]["linked_bytes"] == 0
    found: dict[str, Any] = {f"w{at}": torch.zeros(MIB) for at in range(4)}
    found |= {"own": pt214_dcp.PerRank(torch.zeros(5, dtype=torch.int64)), "step": 1}
    pt214_dcp.load(found, tmp_path)
    assert all(torch.equal(found[f"w{at}"], state[f"w{at}"]) for at in range(4))
    assert found["own"].value.tolist() == [0, 1, 2, 3, 4]
    assert told("verify", tmp_path)[0] == 0


def test_reshard_writes_what_so_many_ranks_would_have(tmp_path: Path, told: Told) -> None:
    row = torch.arange(3000.0).view(1000, 3)
    state = {"w": torch.randn(1001, 300), "small": torch.ones(2), "a": row, "b": row.t(), "n": 3}
    state["tie"] = state["w"]
    pt214_dcp.save(state, tmp_path / "1")
    assert told("reshard", tmp_path / "1", tmp_path / "4", "--ranks", 4)[1]["ranks"] == 4
    assert told("diff", tmp_path / "1", tmp_path / "4") == (
        0, {"same": True, "differences": [], "tensors": []}
    )  # fmt: skip
    sizes = [manifest.data_bytes for manifest in open_checkpoint(tmp_path / "4").manifests()]
    assert min(sizes) > 0.2 * sum(sizes)


def test_what_nobody_could_deal_is_not_resharded(tmp_path: Path, told: Told) -> None:
    pt214_dcp.save({"own": pt214_dcp.PerRank(1)}, tmp_path / "1")
    status, facts = told("reshard", tmp_path / "1", tmp_path / "2", "--ranks", 2)
    assert status == 1
    assert "PerRank values" in facts["message"]
    assert not (tmp_path / "2" / "COMMIT.json").exists()


def test_a_rewrite_that_fails_leaves_the_old_checkpoint(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no more")

    monkeypatch.setattr("pt214_dcp.commit.commit", fail)
    with pytest.raises(OSError, match="no more"):
        rewrite(Path(checkpoint), Path(checkpoint))
    assert len(list(Path(checkpoint).glob("gen-*"))) == 1
    assert told("verify", checkpoint)[0] == 0


def test_bench_prints_ratios_and_leaves_nothing(tmp_path: Path, told: Told) -> None:
    status, facts = told("bench", tmp_path, "--mib", 32, "--rounds", 1)
    assert status == 0
    assert facts["save_over_raw"] > 0
    assert facts["seconds"].keys() >= {"save", "load", "raw write", "raw read"}
    assert list(tmp_path.iterdir()) == []
    assert told("bench", tmp_path, "--mib", 1)[0] == 2
