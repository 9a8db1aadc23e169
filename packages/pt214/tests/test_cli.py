import importlib.metadata

import pytest
from pt214 import __main__ as cli
from pt214.parts import PARTS


def test_the_help_lists_every_command_of_ours_and_of_each_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 0
    printed = capsys.readouterr().out
    for name in ("doctor", "demo", *(part.name for part in PARTS)):
        assert f"\n  {name} " in printed


def test_an_unknown_command_lists_the_known_and_ends_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["trian"]) == 2
    assert "no command is called 'trian'; the commands are doctor, demo" in capsys.readouterr().err


def test_a_missing_parts_command_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda **_: [])
    assert cli.main(["dcp", "ls"]) == 2
    assert "pip install 'pt214[dcp]'" in capsys.readouterr().err


def test_a_parts_command_gets_the_words_after_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("dcp", "os.path:basename", "pt214.commands")
    monkeypatch.setattr(cli, "entry_points", lambda **_: [entry])
    monkeypatch.setattr("os.path.basename", lambda words: 0 if words == ["ls", "x"] else 1)
    assert cli.main(["dcp", "ls", "x"]) == 0


def test_the_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"pt214 {importlib.metadata.version('pt214')}\n"
