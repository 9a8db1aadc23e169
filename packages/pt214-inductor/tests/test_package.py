"""Importing the part costs nothing, needs no triton, and torch finds the backend by its name."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points

import pytest
import torch
from pt214_inductor import ops
from pt214_inductor.backend import compile_fx

KERNEL = "pt214_inductor.kernels.softmax"
HEAVY = ("triton", "torch._inductor.compile_fx", "torch._dynamo.eval_frame")

IMPORT = f"""
import sys, torch
before = set(sys.modules)
import pt214_inductor
print([n for n in {HEAVY} if n in sys.modules and n not in before])
"""


def test_the_import_is_silent_and_brings_neither_triton_nor_a_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_the_op_works_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, KERNEL, raising=False)
    assert ops.softmax(torch.zeros(2)).tolist() == [0.5, 0.5]
    with pytest.raises(ModuleNotFoundError, match="triton"):
        import_module(KERNEL)  # triton was really away


def test_the_name_leads_to_the_backend_without_an_import_of_ours() -> None:
    """Torch loads installed backends by their entry points; nothing of ours registers the name."""
    (point,) = entry_points(group="torch_dynamo_backends", name="pt214")
    assert point.load() is compile_fx
    compiled = torch.compile(lambda x: x @ x, backend="pt214")  # a library call: no C++ compiler
    torch.testing.assert_close(compiled(torch.ones(2, 2)), torch.full((2, 2), 2.0))
