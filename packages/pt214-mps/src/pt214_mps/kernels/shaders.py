"""Load the Metal sources that lie beside this file.

``torch.mps.compile_shader`` compiles a text once per call, so each library is kept.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import torch

__all__ = ["available", "library", "source"]


class ShaderUnavailable(RuntimeError):
    """There is no device to compile for; ``ops`` turns it into its own error."""


def available() -> bool:
    """Whether this process can run Metal kernels."""
    return bool(torch.backends.mps.is_available())


def source(name: str) -> str:
    """Text of ``<name>.metal``."""
    return files(__package__).joinpath(f"{name}.metal").read_text(encoding="utf-8")


@cache
def library(name: str) -> Any:
    """The compiled library of ``<name>.metal``: an attribute per kernel.

    Raises:
        ShaderUnavailable: no MPS device, so nothing is compiled.
    """
    if not available():
        raise ShaderUnavailable(
            f"{name}.metal needs an Apple GPU: torch.backends.mps.is_available() is False here"
        )
    return torch.mps.compile_shader(source(name))
