"""The four parts: which are installed, and the command that adds a missing one.

Nothing here imports a part: a lookup costs a path search, so ``import pt214`` stays free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

__all__ = ["PARTS", "MissingPart", "Part", "load", "part"]


@dataclass(frozen=True, slots=True)
class Part:
    """One distribution of the family."""

    name: str  # as in the extra: pt214[name]
    owns: str  # half a sentence for a person

    @property
    def module(self) -> str:
        """Import name."""
        return f"pt214_{self.name}"

    @property
    def distribution(self) -> str:
        """Name on the index."""
        return f"pt214-{self.name}"

    @property
    def install(self) -> str:
        """The command that adds this part."""
        return f"pip install 'pt214[{self.name}]'"

    @property
    def installed(self) -> bool:
        """Whether its module can be found; nothing is imported."""
        return find_spec(self.module) is not None

    def version(self) -> str | None:
        """Installed version, or None; a checkout on the path without metadata has none either."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None


PARTS = (
    Part("mps", "Apple GPUs: Metal kernels and no silent CPU fallback"),
    Part("inductor", "the torch.compile backend"),
    Part("elastic", "training that survives lost ranks"),
    Part("dcp", "asynchronous, crash-safe checkpoints"),
)


class MissingPart(ImportError):
    """A part that this call needs is not installed; the message holds the command that adds it."""


def part(name: str) -> Part:
    """The part called ``name``.

    Raises:
        ValueError: there is no such part; the message lists those there are.
    """
    for candidate in PARTS:
        if candidate.name == name:
            return candidate
    known = ", ".join(candidate.name for candidate in PARTS)
    raise ValueError(f"name: no part is called {name!r}; the parts are {known}")


def load(name: str, *, why: str) -> ModuleType:
    """Import the part called ``name``, for the purpose ``why`` ("pt214 demo").

    Raises:
        MissingPart: it is not installed.
    """
    wanted = part(name)
    if not wanted.installed:
        raise MissingPart(
            f"{why} needs {wanted.distribution} ({wanted.owns}), which is not installed: "
            f"{wanted.install}",
            name=wanted.module,
        )
    return import_module(wanted.module)
