"""Importing the part costs nothing and needs no triton; torch finds the backend by its name."""

import subprocess
import sys
from importlib.metadata import entry_points

import torch
from pt214_inductor.backend import compile_fx

HEAVY = ("triton", "torch._inductor.compile_fx", "torch._dynamo.eval_frame")

# An import costs seconds, so one process answers both: what the import brings, and, with triton
# taken away from then on, whether the op still serves.
IMPORT = f"""
import sys, torch
before = set(sys.modules)
import pt214_inductor
assert [n for n in {HEAVY} if n in sys.modules and n not in before] == [], sys.modules
sys.modules["triton"] = None
print(pt214_inductor.ops.softmax(torch.zeros(2)).tolist())
"""


def test_the_import_is_silent_and_light_and_the_op_works_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.stdout == "[0.5, 0.5]\n", done.stderr


def test_the_name_leads_to_the_backend_without_an_import_of_ours() -> None:
    """Torch loads installed backends by their entry points; nothing of ours registers the name."""
    (point,) = entry_points(group="torch_dynamo_backends", name="pt214")
    assert point.load() is compile_fx
    compiled = torch.compile(lambda x: x @ x, backend="pt214")  # a library call: no C++ compiler
    torch.testing.assert_close(compiled(torch.ones(2, 2)), torch.full((2, 2), 2.0))
