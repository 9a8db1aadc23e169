"""What a command answers, and how it is shown: lines for people, one JSON object for programs."""

from __future__ import annotations

import argparse
import enum
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pt214_dcp.progress import Told, meter


class Status(enum.IntEnum):
    """Exit status."""

    WELL = 0
    FOUND = 1  # damage, differences, or no checkpoint
    USAGE = 2
    INTERRUPTED = 130  # as shells tell of Ctrl-C


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command found.

    Attributes:
        facts: for ``--json``.
        lines: for people.
        status: exit status.
    """

    facts: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    status: Status = Status.WELL

    def text(self, *, as_json: bool) -> str:
        """What to print."""
        if as_json:
            return json.dumps(_finite(self.facts), allow_nan=False)
        return "\n".join(self.lines)


class Command(NamedTuple):
    """A command's words and what it does."""

    help: str
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Answer]


def path_argument(parser: argparse.ArgumentParser, name: str = "path", about: str = "") -> None:
    """A positional path."""
    parser.add_argument(name, type=Path, help=about or "folder of a checkpoint")


def above_zero(text: str) -> int:
    """Type of an option that counts."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not allowed; it must be 1 or more")
    return number


def shown(arguments: argparse.Namespace, title: str) -> Any:
    """A meter on stderr if somebody looks at it."""
    wanted: bool | Told = sys.stderr.isatty() and not arguments.json
    return meter(wanted, title)


def _finite(facts: Any) -> Any:
    """JSON has no NaN and no infinity, so they become the texts "nan", "inf" and "-inf"."""
    if isinstance(facts, float):
        return facts if math.isfinite(facts) else str(facts)
    if isinstance(facts, dict):
        return {key: _finite(value) for key, value in facts.items()}
    return [_finite(each) for each in facts] if isinstance(facts, list) else facts


def size_of(count: int) -> str:
    """Bytes in words."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("the last unit returns")
