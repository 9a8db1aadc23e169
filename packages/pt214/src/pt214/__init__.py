"""One install and one command line over the pt214 parts."""

from pt214.parts import MissingPart
from pt214.switch import Enabled, disable, enable

__all__ = ["Enabled", "MissingPart", "disable", "enable"]
