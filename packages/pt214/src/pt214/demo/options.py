"""What a demo run is asked to do: arguments, their checks, and the plan handed to the ranks."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

__all__ = ["DemoError", "FaultKind", "Options", "Plan", "parse"]

RESUME_RANKS = 2
MARK = ".pt214-demo"  # in a folder that a demo has made or was given empty of these names:
REMOVED = ("work", "checkpoints", "logs", "demo.json", "demo.png")
MIN_STEPS = 10  # fewer leave no room for a fault, a rejoin and a checkpoint after it


class DemoError(Exception):
    """The demo cannot run as asked; the message says what to change."""


class FaultKind(StrEnum):
    """What happens to one rank in the middle."""

    NONE = "none"
    KILL = "kill"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of ``pt214 demo``, checked."""

    ranks: int
    steps: int
    fault: FaultKind
    text: Path | None
    out: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank needs to know; travels as a JSON file, so a new rank reads the same."""

    text: str  # file of raw bytes
    checkpoints: str  # folder
    cache: str  # compiled code, shared by the ranks
    steps: int
    ranks: int  # the world size to be back at before the end
    every: int  # steps between checkpoints
    device: str  # "cpu", "cuda", "mps"
    compile: bool

    def write(self, path: Path) -> None:
        """Store as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """The plan stored at ``path``."""
        return cls(**json.loads(path.read_text()))


def parse(argv: Sequence[str]) -> Options:
    """Checked options.

    Raises:
        DemoError: a value makes no sense; the message names the argument and what is allowed.
    """
    parser = argparse.ArgumentParser(
        prog="pt214 demo",
        description="Train a small GPT on real text, kill a rank in the middle, see it heal.",
    )
    add = parser.add_argument
    add("--ranks", type=int, help="processes to train with (default 4, or 1 where MPS is)")
    add("--steps", type=int, default=160, help="training steps (default 160)")
    add("--fault", choices=[*map(str, FaultKind)], help="what hits one rank (default kill)")
    add("--text", type=Path, help="a text file or a folder of them (default: Python's library)")
    add("--out", type=Path, default=Path("pt214-demo"), help="folder for demo.png and demo.json")
    words = parser.parse_args(argv)
    if words.ranks is None:
        words.ranks = 1 if _has_mps() else 4
    if words.ranks < 1:
        raise DemoError(f"--ranks {words.ranks}: at least 1 process has to train")
    if words.steps < MIN_STEPS:
        raise DemoError(f"--steps {words.steps}: at least {MIN_STEPS}")
    usual = FaultKind.KILL if words.ranks > 1 else FaultKind.NONE
    fault = FaultKind(words.fault) if words.fault else usual
    if words.ranks == 1 and fault is not FaultKind.NONE:
        raise DemoError(f"--fault {fault} needs a survivor: use --ranks 2 or more")
    return Options(words.ranks, words.steps, fault, words.text, _folder(words.out))


def _has_mps() -> bool:
    if find_spec("torch") is None:  # the part that needs it will say so
        return False
    import torch  # only where the default is asked for: it takes seconds

    return torch.backends.mps.is_available()


def _folder(out: Path) -> Path:
    """Make ``out``, prove that it can be written to, and that what a run removes is a demo's."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        file = out.exists() and not out.is_dir()
        kind = "is a file" if file else os.strerror(error.errno or 0)
        raise DemoError(f"--out {out}: {kind}; name a folder that can be written to") from error
    foreign = [name for name in REMOVED if (out / name).exists()]
    if foreign and not (out / MARK).is_file():
        raise DemoError(
            f"--out {out}: {', '.join(foreign)} in it are not of an earlier demo (no {MARK}), and "
            "a run would replace them; name another folder"
        )
    (out / MARK).touch()
    return out.resolve()
