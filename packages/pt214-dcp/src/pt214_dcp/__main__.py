"""``python -m pt214_dcp COMMAND ...``: look into checkpoints, compare, tidy and rewrite them.

Exit status: 0 well, 1 damage, differences or no checkpoint, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from pt214_dcp.cli.answer import Command, Status
from pt214_dcp.cli.bench import BENCH
from pt214_dcp.cli.change import CONVERT
from pt214_dcp.cli.compare import DIFF, VERIFY
from pt214_dcp.cli.look import CAT, INFO, LS
from pt214_dcp.cli.tidy import COMPACT, PRUNE, REPAIR, RESHARD
from pt214_dcp.errors import BadOption, CheckpointError

COMMANDS: dict[str, Command] = {
    "ls": LS, "info": INFO, "verify": VERIFY, "diff": DIFF, "cat": CAT, "convert": CONVERT,
    "reshard": RESHARD,
    "prune": PRUNE, "compact": COMPACT, "repair": REPAIR, "bench": BENCH,
}  # fmt: skip


_STATUS = "Exit status: 0 well, 1 damage, differences or no checkpoint, 2 wrong usage."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="pt214 dcp",
        description="Look into checkpoints, compare, tidy and rewrite them.",
        epilog=_STATUS,
    )
    below = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = below.add_parser(name, help=command.help, description=command.help, epilog=_STATUS)
        command.add(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        answer = COMMANDS[arguments.command].run(arguments)
    except (CheckpointError, OSError) as error:
        status = Status.USAGE if isinstance(error, BadOption) else Status.FOUND
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return status
    except KeyboardInterrupt:
        return Status.INTERRUPTED
    _show(answer.text(as_json=arguments.json))
    return answer.status


def _show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has enough, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # exit flushes once more


if __name__ == "__main__":
    sys.exit(main())
