"""Options of a worker, and the only module that reads the environment.

The launcher hands a worker its place through ``PT214_ELASTIC_*``: address, key, member id, page.
The key travels in the environment, never on a command line, which every user of a host can read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pt214_elastic.errors import OptionError

ADDRESS = "PT214_ELASTIC_ADDRESS"
KEY = "PT214_ELASTIC_KEY"
MEMBER = "PT214_ELASTIC_MEMBER"
PROGRESS = "PT214_ELASTIC_PROGRESS"
OPTION_NAMES = ("on_fault",)

_explicit: dict[str, str] = {}
_listeners: list[Callable[[str, str], None]] = []


class OnFault(StrEnum):
    """What a job does about a lost rank."""

    REJOIN = "rejoin"
    SHRINK = "shrink"
    SPARE = "spare"
    RAISE = "raise"

    @classmethod
    def parse(cls, value: str) -> OnFault:
        """The policy named ``value``.

        Raises:
            OptionError: there is none of that name.
        """
        try:
            return cls(value)
        except ValueError:
            names = ", ".join(repr(str(item)) for item in cls)
            raise OptionError(f"on_fault={value!r}: expected one of {names}") from None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker finds its coordinator, and who it is there."""

    host: str
    port: int
    key: bytes
    member: int
    progress_path: str = ""  # the page it writes, see ``progress``; empty for none

    def to_env(self) -> dict[str, str]:
        """The variables from which :func:`read_place` makes this again."""
        return {
            ADDRESS: f"{self.host}:{self.port}",
            KEY: self.key.hex(),
            MEMBER: str(self.member),
            PROGRESS: self.progress_path,
        }


def read_place(env: Mapping[str, str] = os.environ) -> Place | None:
    """The place the launcher gave this process; ``None`` outside a launcher.

    Raises:
        OptionError: a variable is there but makes no sense.
    """
    if ADDRESS not in env:
        return None
    host, _, port = env[ADDRESS].rpartition(":")
    page = env.get(PROGRESS, "")
    try:
        return Place(host, int(port), bytes.fromhex(env[KEY]), int(env[MEMBER]), page)
    except (KeyError, ValueError) as error:
        raise OptionError(
            f"{ADDRESS}, {KEY} and {MEMBER} must be host:port, hex digits and a number,"
            f" as the launcher sets them: {error!r}"
        ) from None


def started_by_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether rank, world size and master are in the environment, for ``env://``."""
    return all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def set_option(name: str, value: str) -> None:
    """Set an option of this process's job.

    Args:
        name: ``"on_fault"``, the only one so far.
        value: ``"rejoin"``, ``"shrink"``, ``"spare"`` or ``"raise"``.

    Raises:
        OptionError: unknown name or value.

    >>> set_option("on_fault", "rejoin")
    """
    if name not in OPTION_NAMES:
        raise OptionError(f"option {name!r} is unknown: expected one of {', '.join(OPTION_NAMES)}")
    policy = OnFault.parse(value)
    _explicit[name] = str(policy)
    for listener in _listeners:
        listener(name, str(policy))


def get_option(name: str) -> str | None:
    """The value :func:`set_option` was given last; ``None`` if it never was."""
    return _explicit.get(name)


def on_option(listener: Callable[[str, str], None]) -> None:
    """Have ``listener(name, value)`` called at each :func:`set_option`."""
    _listeners.append(listener)
