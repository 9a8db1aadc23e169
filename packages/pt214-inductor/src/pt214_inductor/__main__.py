"""``python -m pt214_inductor explain SCRIPT`` and ``python -m pt214_inductor check``.

A script for ``explain`` defines ``model`` (a module or function) and ``inputs`` (a tuple).
"""

from __future__ import annotations

import argparse
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from pt214_inductor.compare import explain


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pt214 inductor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("explain", help="compare stock and pt214 on a script's model")
    one.add_argument("script", type=Path, help="defines `model` and `inputs`")
    one.add_argument("--dynamic", action="store_true", help="compile with dynamic=True")
    commands.add_parser("check", help="tell what this machine can compile for")
    args = parser.parse_args(argv)
    return check() if args.command == "check" else explain_script(args.script, args.dynamic)


def explain_script(script: Path, dynamic: bool) -> int:
    if not script.is_file():
        print(f"script: {script} is not a file", file=sys.stderr)
        return 2
    names = runpy.run_path(str(script))
    missing = [name for name in ("model", "inputs") if name not in names]
    if missing:
        print(f"script: {script} must define {' and '.join(missing)}", file=sys.stderr)
        return 2
    inputs = names["inputs"]
    inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    print(explain(names["model"], *inputs, dynamic=dynamic or None))
    return 0


def check() -> int:
    """0 if a model can be compiled here; Triton is needed for a GPU alone."""
    triton = "present" if find_spec("triton") else "missing: pip install triton"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    print(f"torch {torch.__version__}, triton {triton}, GPU {gpu}")
    probe = torch.arange(8.0)
    try:
        result = explain(lambda x: (x - 1).relu(), probe)
    except Exception as error:
        print(f"compiling failed: {error}", file=sys.stderr)
        return 1
    print(f"compiling works: {result.ours.kernels} kernel, difference {result.difference}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
