from pathlib import Path

import pytest
import torch
from pt214_inductor import __main__, explain


def test_something_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="fn: got int, allowed are modules and functions"):
        explain(3)  # type: ignore[arg-type]


def test_the_command_prints_counts_of_both_and_each_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(torch.nn.BatchNorm2d(8), torch.nn.GELU()).eval()\n"
        "model.requires_grad_(False)\n"
        "inputs = (torch.randn(2, 8, 32, 32),)\n"
    )
    assert __main__.main(["explain", str(script)]) == 0
    printed = capsys.readouterr().out
    assert "stock" in printed
    assert "hoisted: coefficients computed once" in printed


def test_a_script_without_a_model_says_what_to_define(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\n")
    assert __main__.main(["explain", str(script)]) == 2
    assert "must define model and inputs" in capsys.readouterr().err
    assert __main__.main(["explain", str(tmp_path / "none.py")]) == 2
    assert "is not a file" in capsys.readouterr().err


def test_check_tells_what_this_machine_compiles_for(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main(["check"])
    assert torch.__version__ in capsys.readouterr().out
