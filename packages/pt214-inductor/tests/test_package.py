"""Importing the part costs nothing and needs no triton."""

import subprocess
import sys

BLOCK_TRITON = "import sys; sys.modules['triton'] = None\n"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_import_brings_neither_triton_nor_a_compiler() -> None:
    names = "'triton', 'torch._inductor.compile_fx', 'torch._dynamo.eval_frame'"
    code = "import torch, sys; before = set(sys.modules); import pt214_inductor\n"
    code += f"print([n for n in ({names}) if n in sys.modules and n not in before])"
    assert run(code) == "[]"


def test_the_op_works_without_triton() -> None:
    code = "import torch, pt214_inductor as p; print(p.ops.softmax(torch.zeros(2)).tolist())"
    assert run(BLOCK_TRITON + code) == "[0.5, 0.5]"


def test_nothing_is_printed_on_import() -> None:
    assert run("import pt214_inductor") == ""
