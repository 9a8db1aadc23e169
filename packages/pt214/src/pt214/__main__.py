"""``pt214``: its own commands, and those of the parts that are installed.

pt214 doctor | demo              ours
pt214 dcp | elastic | ... ARGS   handed over, found in the entry-point group pt214.commands
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points, version

from pt214.parts import PARTS, MissingPart, part

__all__ = ["main"]

# command -> (module with main(argv) -> int, one line for the help)
OURS = {
    "doctor": ("pt214.doctor", "versions, devices, what is missing, what holds you back"),
    "demo": ("pt214.demo", "train a small GPT on 4 ranks, kill one, and see it heal"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Its exit status; 2 where there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_usage())
        return 0
    if words[0] in ("-V", "--version"):
        sys.stdout.write(f"pt214 {version('pt214')}\n")
        return 0
    try:
        return _command(words[0])(words[1:])
    except MissingPart as error:
        sys.stderr.write(f"pt214: {error}\n")
        return 2


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in OURS:
        found: Callable[[Sequence[str]], int] = import_module(OURS[name][0]).main
        return found
    for entry in entry_points(group="pt214.commands", name=name):
        loaded: Callable[[Sequence[str]], int] = entry.load()
        return loaded
    if name in {each.name for each in PARTS}:
        missing = part(name)
        raise MissingPart(f"{missing.distribution} is not installed: {missing.install}")
    return lambda _: _unknown(name)


def _unknown(name: str) -> int:
    known = ", ".join([*OURS, *(each.name for each in PARTS)])
    sys.stderr.write(f"pt214: no command is called {name!r}; the commands are {known}\n")
    return 2


def _usage() -> str:
    lines = ["usage: pt214 COMMAND [ARGS ...]", ""]
    lines += [f"  {name:<10}{text}" for name, (_, text) in OURS.items()]
    installed = {entry.name for entry in entry_points(group="pt214.commands")}
    for each in PARTS:
        state = "" if each.name in installed else f"  [missing: {each.install}]"
        lines.append(f"  {each.name:<10}{each.owns}{state}")
    return "\n".join([*lines, "", "pt214 COMMAND --help tells more.", ""])


if __name__ == "__main__":
    sys.exit(main())
