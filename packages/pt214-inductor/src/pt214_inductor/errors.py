"""The part's errors: one tree, each message names the argument, what came and what is allowed.

Pt214InductorError
  OptionError       a ``pt214.*`` compile option is unknown or has the wrong type
  ShapeError        a tensor given to one of ``pt214_inductor.ops`` does not fit
  StrictError       code of this part failed and ``pt214.strict`` forbids the stock fallback
"""


class Pt214InductorError(Exception):
    """Root of every error that this part raises on its own account."""


class OptionError(Pt214InductorError, ValueError):
    """A compile option of this part is unknown or has a value of the wrong type."""


class ShapeError(Pt214InductorError, ValueError):
    """A tensor's shape, dtype or device does not fit the op it was given to."""


class StrictError(Pt214InductorError, RuntimeError):
    """Code of this part failed; without ``pt214.strict`` stock inductor would have served."""
