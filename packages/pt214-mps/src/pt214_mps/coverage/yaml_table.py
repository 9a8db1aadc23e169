"""Read torch's own operator list: ``native_functions.yaml``, shipped inside its wheel (torchgen).

A torch built without MPS has no MPS kernels in its dispatcher, so its dispatcher can't tell what a
Mac would do; the list it was built from can. Rules of the list, in the order torchgen applies them:

    dispatch has MPS                                      -> an MPS kernel
    structured_delegate: F, and F's dispatch has MPS      -> an MPS kernel
    Composite..Autograd.., or neither of the two fields   -> made of other operators
    anything else, an empty dispatch ({}) included        -> none

``autogen: f.out`` names a variant that torchgen writes itself: it calls the operator and copies.
None is written for a CompositeImplicitAutograd operator (no dispatch means that, too) unless its
tag is ``core``.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pt214_mps.errors import MPSError

__all__ = ["COMPOSITE", "Declared", "declared"]

COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)
GENERATED: dict[str, Any] = {"dispatch": {"CompositeExplicitAutograd": ""}}


class Declared:
    """What the list says of each operator, by its overload's name (``add.Tensor``)."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        generated = {name: GENERATED for entry in entries for name in self._generated(entry)}
        listed = {entry["func"].partition("(")[0]: entry for entry in entries}
        self._by_name = generated | listed

    def names(self) -> list[str]:
        """Every overload of the list."""
        return list(self._by_name)

    def knows(self, name: str) -> bool:
        """Whether the list has this overload."""
        return name in self._by_name

    def has_kernel(self, name: str, backend: str = "MPS") -> bool:
        """Whether ``backend`` has a kernel of its own."""
        entry = self._by_name[name]
        if backend in self._keys(entry):
            return True
        delegate = entry.get("structured_delegate")
        return delegate is not None and backend in self._keys(self._by_name[delegate])

    def is_composite(self, name: str) -> bool:
        """Whether the operator is written in terms of others, and runs wherever those do."""
        entry = self._by_name[name]
        return self._is_implicit(entry) or not self._keys(entry).isdisjoint(COMPOSITE)

    @classmethod
    def _generated(cls, entry: dict[str, Any]) -> list[str]:
        if cls._is_implicit(entry) and "core" not in entry.get("tags", ()):
            return []
        return [name.strip() for name in entry.get("autogen", "").split(",") if name]

    @classmethod
    def _is_implicit(cls, entry: dict[str, Any]) -> bool:
        unsaid = entry.keys().isdisjoint(("dispatch", "structured_delegate"))
        return unsaid or COMPOSITE[0] in cls._keys(entry)

    @staticmethod
    def _keys(entry: dict[str, Any]) -> set[str]:
        listed = entry.get("dispatch") or {}
        return {key.strip() for keys in listed for key in str(keys).split(",")}


@cache
def declared() -> Declared:
    """The list of the torch at hand.

    Raises:
        MPSError: this torch ships no list.
    """
    import yaml

    spec = find_spec("torchgen")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    for root in roots:
        path = root / "packaged" / "ATen" / "native" / "native_functions.yaml"
        if path.is_file():
            loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
            return Declared(yaml.load(path.read_text(encoding="utf-8"), Loader=loader))
    raise MPSError(
        "this torch ships no operator list (torchgen/packaged/ATen/native/native_functions.yaml): "
        "install torch from a wheel"
    )
