import pytest
from pt214 import parts


def test_a_missing_part_names_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "find_spec", lambda _: None)
    with pytest.raises(parts.MissingPart, match=r"pt214 demo needs pt214-dcp .*pt214\[dcp\]"):
        parts.load("dcp", why="pt214 demo")


def test_an_unknown_part_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match="no part is called 'cuda'; the parts are mps, inductor"):
        parts.part("cuda")
