from pathlib import Path

import pytest
from pt214.demo.command import main
from pt214.demo.options import DemoError, FaultKind, Plan, parse


def test_defaults_are_four_ranks_and_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pt214.demo.options._has_mps", lambda: False)
    options = parse(["--out", str(tmp_path / "new" / "folder")])
    assert (options.ranks, options.fault) == (4, FaultKind.KILL)
    assert options.out.is_dir()


def test_one_rank_trains_without_a_fault_unless_one_is_asked_for(tmp_path: Path) -> None:
    assert parse(["--ranks", "1", "--out", str(tmp_path)]).fault is FaultKind.NONE
    with pytest.raises(DemoError, match="--fault kill needs a survivor: use --ranks 2 or more"):
        parse(["--ranks", "1", "--fault", "kill", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "--ranks 0: at least 1"),
        (["--ranks", "-2"], "--ranks -2: at least 1"),
        (["--steps", "3"], "--steps 3: at least 10"),
    ],
)
def test_numbers_out_of_range_name_the_argument(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_out_that_is_a_file_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    assert main(["--out", str(file)]) == 2
    assert "is a file; name a folder that can be written to" in capsys.readouterr().err
    assert file.read_text() == "precious"


@pytest.mark.parametrize("name", ["checkpoints", "logs", "work", "demo.json"])
def test_out_that_holds_something_of_the_users_is_refused_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mine = tmp_path / name if "." in name else tmp_path / name / "precious"
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("precious")
    assert main(["--out", str(tmp_path)]) == 2
    assert f"{name} in it are not of an earlier demo" in capsys.readouterr().err
    assert mine.read_text() == "precious"


def test_out_of_an_earlier_demo_is_taken_again(tmp_path: Path) -> None:
    parse(["--out", str(tmp_path / "new")])
    (tmp_path / "new" / "checkpoints").mkdir()
    assert parse(["--out", str(tmp_path / "new")]).out == tmp_path / "new"


def test_where_mps_is_one_process_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pt214.demo.options._has_mps", lambda: True)
    options = parse(["--out", str(tmp_path)])
    assert (options.ranks, options.fault) == (1, FaultKind.NONE)


def test_out_that_cannot_be_written_to_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", "/proc/pt214-demo"]) == 2  # no user can write there, root included
    assert "name a folder that can be written to" in capsys.readouterr().err


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = Plan("text", "checkpoints", "cache", 10, 4, 2, "cpu", compile=True)
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
