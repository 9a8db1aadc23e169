"""``python -m pt214_dcp ls|info|verify PATH [--json]``.

Exit status: 0 well, 1 a checkpoint is damaged or there is none, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.errors import CheckpointError
from pt214_dcp.reader import open_checkpoint
from pt214_dcp.verifier import verify


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="pt214 dcp", description="Look into checkpoints.")
    parser.add_argument("command", choices=_COMMANDS)
    parser.add_argument("path", type=Path, help="a checkpoint; for ls also a folder of steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        facts, lines, status = _COMMANDS[arguments.command](arguments.path)
    except (CheckpointError, OSError) as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(facts) if arguments.json else "\n".join(lines))
    return status


_Answer = tuple[dict[str, Any], list[str], int]


def _ls(path: Path) -> _Answer:
    """Tensors of a checkpoint, or steps of a folder."""
    steps = Checkpointer(path).steps()
    if steps:
        return {"steps": steps}, [str(step) for step in steps], 0
    tensors = {
        key: {"dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
        for key, t in open_checkpoint(path.absolute()).tensors.items()
    }
    lines = [f"{t['dtype']:>10}  {t['shape']!s:<20}  {key}" for key, t in tensors.items()]
    return {"tensors": tensors}, lines, 0


def _info(path: Path) -> _Answer:
    checkpoint = open_checkpoint(path.absolute())
    facts = {
        "generation": checkpoint.commit.generation,
        "ranks": checkpoint.commit.world_size,
        "tensors": len(checkpoint.tensors),
        "chunks": sum(len(manifest.chunks) for manifest in checkpoint.manifests()),
        "size_bytes": checkpoint.commit.size_bytes,
        "rank_size_bytes": [manifest.data_bytes for manifest in checkpoint.manifests()],
    }
    return facts, [f"{name}: {value}" for name, value in facts.items()], 0


def _verify(path: Path) -> _Answer:
    last = -1

    def progress(read_bytes: int, total_bytes: int) -> None:
        nonlocal last
        percent = 100 * read_bytes // max(total_bytes, 1)
        if percent != last and sys.stderr.isatty():
            print(f"\r{percent:3d} %", end="", file=sys.stderr, flush=True)
            last = percent

    found = verify(path, raises=False, progress=progress)
    facts = {
        "tensors": found.tensors, "size_bytes": found.size_bytes, "errors": list(found.errors)
    }  # fmt: skip
    told = f"{found.tensors} tensors, {found.size_bytes} bytes, {len(found.errors)} damaged blocks"
    return facts, [told, *found.errors], 1 if found.errors else 0


_COMMANDS = {"ls": _ls, "info": _info, "verify": _verify}

if __name__ == "__main__":
    sys.exit(main())
