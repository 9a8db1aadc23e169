"""Compile options of this part: ``torch.compile(..., options={"pt214.strict": True})``.

Names that start with ``pt214.`` are ours, every other one is inductor's and passes on unread. This
is the one module that reads the environment: ``PT214_INDUCTOR_STRICT=1`` changes the default of
``pt214.strict``, for test runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pt214_inductor.errors import OptionError

PREFIX = "pt214."


def _strict_default() -> bool:
    return os.environ.get("PT214_INDUCTOR_STRICT", "0") == "1"


@dataclass(frozen=True, slots=True)
class Options:
    """What one ``torch.compile`` call asks of this part."""

    strict: bool = False  # a failure of ours raises StrictError instead of falling back
    hoist: bool = True  # run the affine-hoisting pass
    one_compile: bool = True  # trace so that one compile serves every size


def split(options: Mapping[str, Any] | None) -> tuple[Options, dict[str, Any]]:
    """Separate our options from inductor's.

    Args:
        options: as given to ``torch.compile``; inductor's names may use ``-`` or ``_``.

    Returns:
        Ours, and what is left for inductor.

    Raises:
        OptionError: an unknown ``pt214.`` name, or a value that is no bool.

    >>> split({"pt214.strict": True, "max_autotune": True})[1]
    {'max_autotune': True}
    """
    known = [field.name for field in fields(Options)]
    ours: dict[str, bool] = {"strict": _strict_default()}
    theirs: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not key.startswith(PREFIX):
            theirs[key] = value
            continue
        name = key.removeprefix(PREFIX).replace("-", "_")
        if name not in known:
            allowed = ", ".join(PREFIX + each for each in known)
            raise OptionError(f"options: got {key!r}, known names are {allowed}")
        if not isinstance(value, bool):
            raise OptionError(f"options: {key!r} got {value!r}, allowed are True and False")
        ours[name] = value
    return Options(**ours), theirs
