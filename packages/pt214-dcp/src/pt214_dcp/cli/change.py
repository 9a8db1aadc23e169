"""``convert``: from one format to another."""

from __future__ import annotations

import argparse

from pt214_dcp.cli.answer import Answer, Command, path_argument, shown


def run_convert(arguments: argparse.Namespace) -> Answer:
    """Read whatever lies at the source; write the target."""
    from pt214_dcp.interop.convert import (
        convert,
        kind_of,
    )  # torch's checkpoints take long to import

    found = kind_of(arguments.path.absolute())
    with shown(arguments, "convert") as told:
        convert(arguments.path, arguments.target, to=arguments.to, progress=told)
    facts = {"from": found.value, "to": arguments.to, "target": str(arguments.target)}
    return Answer(facts, [f"{arguments.target}: {arguments.to}, from {found.value}"])


def _add(parser: argparse.ArgumentParser) -> None:
    path_argument(parser, about="a pt214 or stock checkpoint, safetensors, or a torch.save file")
    path_argument(parser, "target", "where to write")
    parser.add_argument(
        "--to", default="pt214", help="pt214 (default), stock, safetensors or torch"
    )


CONVERT = Command("write a checkpoint in another format", _add, run_convert)
