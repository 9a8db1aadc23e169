import pytest
from pt214_inductor.errors import OptionError
from pt214_inductor.options import Options, split


def test_ours_are_told_from_inductors() -> None:
    ours, theirs = split({"pt214.strict": True, "max_autotune": True})
    assert ours == Options(strict=True)
    assert theirs == {"max_autotune": True}


def test_an_unknown_name_of_ours_lists_the_known() -> None:
    with pytest.raises(OptionError, match=r"got 'pt214.strct', known names are pt214.strict"):
        split({"pt214.strct": True})


def test_a_value_that_is_no_bool_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'pt214.hoist' got 1, allowed are True and False"):
        split({"pt214.hoist": 1})


def test_the_environment_changes_the_default_of_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT214_INDUCTOR_STRICT", "1")
    assert split(None)[0].strict is True
    assert split({"pt214.strict": False})[0].strict is False
