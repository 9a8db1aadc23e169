"""Names in torch.distributed.checkpoint and paths in a tree: ``model.w`` and ("model", "w").

Its planners flatten nested state; a name joins the path by dots, and ``planner_data`` keeps the
path of each name. Keys with dots of their own may make two paths share a name: those are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pt214_dcp.errors import CheckpointError
from pt214_dcp.trees import Json, children

Path = tuple[str | int, ...]


def name_of(path: Path) -> str:
    """The name that torch's planners give a path."""
    return ".".join(map(str, path))


def leaves_of(tree: Json, path: Path = ()) -> Iterable[tuple[Path, Json]]:
    """Path and tree of each value that torch's planners handle as one.

    They go into every dict, into a list only if it holds tensors or dicts, and into no tuple.
    """
    kind = next(iter(tree)) if isinstance(tree, dict) else ""
    if kind == "dict" or (kind == "list" and _holds_more(tree)):
        for key, item in children(tree):
            yield from leaves_of(item, (*path, key))
    else:
        yield path, tree


def _holds_more(tree: Json) -> bool:
    for _, item in children(tree):
        kind = next(iter(item)) if isinstance(item, dict) else ""
        if kind in ("tensor", "dict") or (kind == "list" and _holds_more(item)):
            return True
    return False


def names_of(tree: Json) -> dict[str, tuple[Path, Json]]:
    """Name -> path and tree of each leaf.

    Raises:
        CheckpointError: two paths have one name.
    """
    found: dict[str, tuple[Path, Json]] = {}
    for path, leaf in leaves_of(tree):
        name = name_of(path)
        if name in found:
            raise CheckpointError(
                f"keys {found[name][0]} and {path} are both {name!r} to torch.distributed."
                "checkpoint; load with pt214_dcp.load"
            )
        found[name] = (path, leaf)
    return found


def tree_of(leaves: Mapping[Path, Json]) -> Json:
    """The tree that has these leaves; whole numbers in a path are places of a list.

    Raises:
        CheckpointError: a path goes through a leaf, or a list has holes.
    """
    nested: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
            if not isinstance(at, dict):
                raise CheckpointError(f"{name_of(path)}: goes through a value")
        at[path[-1]] = _Leaf(leaf)
    return _encode(nested, top=True)


class _Leaf:
    """So that a leaf's own dict is no container."""

    def __init__(self, tree: Json) -> None:
        self.tree = tree


def _encode(value: Any, *, top: bool = False) -> Json:
    if isinstance(value, _Leaf):
        return value.tree
    # torch's planners name places of lists by whole numbers, and keys of dicts by texts.
    numbered = not top and all(type(key) is int for key in value)
    if numbered and value and sorted(value) == list(range(len(value))):
        return {"list": [_encode(value[at]) for at in range(len(value))]}
    keys = sorted(value, key=lambda key: (isinstance(key, str), key))
    return {"dict": [[key, _encode(value[key])] for key in keys]}
