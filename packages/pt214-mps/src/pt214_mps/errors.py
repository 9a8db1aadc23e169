"""Errors of this part: one small tree."""

__all__ = ["ArgumentError", "MPSError", "NoMPS"]


class MPSError(Exception):
    """Anything that pt214-mps raises on purpose."""


class ArgumentError(MPSError, ValueError):
    """An argument does not fit; the message names it, what came and what is allowed."""


class NoMPS(MPSError, RuntimeError):
    """A Metal kernel was asked for where there is no MPS device."""
