"""``explain`` counts what was generated and says why; the command line prints it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pt214_inductor import explain
from pt214_inductor.__main__ import main
from pt214_inductor.counting import Counts, count

WRAPPER = r"""
k0 = async_compile.triton('k0', '''...''')
k1 = async_compile.cpp_pybinding(['*'], r'''
    {
        #pragma GCC ivdep
        for(int64_t x0=0; x0<8; x0+=1)
        {
            for(int64_t x1=0; x1<8; x1+=1)
            {
                out[x1] = 1;
            }
        }
    }
    for(int64_t x0=0; x0<8; x0+=1) { out[x0] = 2; }
''')
def call(args):
    buf0 = extern_kernels.convolution(a, b)
    k0.run(buf0, stream=s)
    k0.run(buf0, stream=s)
    k1(buf0)
"""


def test_kernels_launches_and_library_calls_are_counted() -> None:
    assert count([WRAPPER, WRAPPER]) == Counts(graphs=2, kernels=4, loops=6, launches=6, extern=2)
    assert count([]) == Counts(0, 0, 0, 0, 0)


def test_both_sides_are_compiled_and_agree() -> None:
    found = explain(lambda x: (x * 2).relu(), torch.randn(16))
    assert found.stock == found.ours == Counts(1, 1, 1, 1, 0)
    assert found.difference == 0
    assert str(found).endswith("no pass found a place to change")


def test_a_compiled_function_is_taken_apart() -> None:
    assert explain(torch.compile(torch.nn.ReLU()), torch.randn(4)).ours.graphs == 1


def test_what_cannot_be_called_is_refused() -> None:
    not_callable: Any = 3
    with pytest.raises(TypeError, match="fn: got int, allowed are modules and functions"):
        explain(not_callable)


def test_the_command_explains_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "model.py"
    script.write_text("import torch\nmodel = torch.nn.ReLU()\ninputs = torch.ones(4)\n")
    assert main(["explain", str(script)]) == 0
    assert "largest difference of the results: 0" in capsys.readouterr().out


def test_a_missing_or_incomplete_script_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(tmp_path / "none.py")]) == 2
    assert "is not a file" in capsys.readouterr().err
    script = tmp_path / "half.py"
    script.write_text("model = abs\n")
    assert main(["explain", str(script)]) == 2
    assert "must define inputs" in capsys.readouterr().err


def test_check_tells_that_compiling_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    assert "compiling works: 1 kernel" in capsys.readouterr().out
