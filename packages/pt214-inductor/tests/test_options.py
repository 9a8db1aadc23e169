"""Options are split between inductor and us, and a wrong one is named."""

import pytest
from pt214_inductor.errors import OptionError
from pt214_inductor.options import Options, split


def test_ours_are_taken_out_and_the_rest_goes_to_inductor() -> None:
    ours, theirs = split({"pt214.strict": True, "pt214.hoist": False, "max_autotune": True})
    assert ours == Options(strict=True, hoist=False)
    assert theirs == {"max_autotune": True}


def test_no_options_means_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PT214_INDUCTOR_STRICT", raising=False)
    assert split(None) == (Options(), {})


def test_the_environment_makes_strict_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PT214_INDUCTOR_STRICT", "1")
    assert split(None)[0].strict
    assert not split({"pt214.strict": False})[0].strict


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"got 'pt214.stric', known names are pt214.strict"):
        split({"pt214.stric": True})


def test_a_value_that_is_no_bool_is_refused() -> None:
    with pytest.raises(OptionError, match=r"'pt214.hoist' got 1, allowed are True and False"):
        split({"pt214.hoist": 1})
