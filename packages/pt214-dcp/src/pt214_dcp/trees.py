"""The tree of a state dict as it is stored: nesting, values, and numbers in the places of tensors.

    {"dict": [["epoch", 3], ["model", {"dict": [["w", {"tensor": 0}]]}]]}

Pure data: lists, texts and numbers that any reader of msgpack knows. ``state.py`` makes trees and
puts them back together.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pt214_dcp.arrays import unpack_number

Json = Any  # what json.dumps takes


def join(prefix: str, key: str | int) -> str:
    """Path of ``key`` below ``prefix``."""
    if isinstance(key, int):
        text = f"[{key}]"
    else:
        text = key or "~3"
        if "~" in key or "/" in key or key.startswith("["):
            text = key.replace("~", "~0").replace("/", "~1")
            text = "~2" + text[1:] if text.startswith("[") else text
    return f"{prefix}/{text}" if prefix else text


def children(tree: Json) -> Iterator[tuple[str | int, Json]]:
    """Key and tree of each item of a container; nothing for a leaf."""
    if isinstance(tree, dict):
        if "dict" in tree:
            yield from tree["dict"]
        else:
            yield from enumerate(tree.get("list") or tree.get("tuple") or ())


def kind_of(tree: Json) -> str:
    """What stands at the top of a tree: "tensor", "dict"..., or "value"."""
    kind = next(iter(tree)) if isinstance(tree, dict) else "value"
    return "value" if kind in _DECODE else kind


def kinds(tree: Json, path: str = "") -> dict[str, str]:
    """Path of each leaf and of each container -> its kind, to compare two trees."""
    found: dict[str, str] = {}
    _add_kinds(found, tree, path)
    return found


def _add_kinds(found: dict[str, str], tree: Json, path: str) -> None:
    kind = kind_of(tree)
    if kind not in ("dict", "list", "tuple"):
        found[path] = "PerRank" if kind == "per_rank" else kind
        return
    if path:
        found[path + "/"] = kind
    for key, item in children(tree):
        _add_kinds(found, item, join(path, key))


def checked(tree: Json, tensors: int, own: int | None = None) -> dict[str, str]:
    """``kinds`` of a tree that was read, once it is held against the form of trees.

    Args:
        tree: what a record holds.
        tensors: that it may number.
        own: how many ``PerRank`` it may number; None for any.

    Raises:
        ValueError: it is no tree; the message says where it is not.
    """
    found: dict[str, str] = {}
    _check(found, tree, "", tensors, own)
    return found


def _check(found: dict[str, str], tree: Json, path: str, tensors: int, own: int | None) -> None:
    if not isinstance(tree, dict):
        if not isinstance(tree, str | int | float | None):
            raise ValueError(f"a {type(tree).__name__} at {path!r} of the tree")
        found[path] = "value"
        return
    if len(tree) != 1:
        raise ValueError(f"{len(tree)} kinds at {path!r} of the tree: {list(tree)[:5]}")
    ((kind, below),) = tree.items()
    if kind in ("tensor", "numpy", "per_rank"):
        most = own if kind == "per_rank" else tensors
        if type(below) is not int or below < 0 or (most is not None and below >= most):
            raise ValueError(f"{kind} {below!r} in a tree of {most}")
        found[path] = "PerRank" if kind == "per_rank" else kind
        return
    if kind in _DECODE:
        decode_scalar(tree)
        found[path] = "value"
        return
    if kind not in ("dict", "list", "tuple") or not isinstance(below, list):
        raise ValueError(f"kind {kind!r} of a {type(below).__name__} at {path!r} of the tree")
    if path:
        found[path + "/"] = kind
    for key, item in below if kind == "dict" else enumerate(below):
        if type(key) is not str and type(key) is not int:
            raise ValueError(f"a key of the tree is a {type(key).__name__}")
        _check(found, item, join(path, key), tensors, own)


def renumbered(tree: Json, numbers: Sequence[int]) -> Json:
    """The same tree, with ``numbers[n]`` in the place of the tensor or array ``n``."""
    if not isinstance(tree, dict):
        return tree
    (kind, below), *_ = tree.items()
    if kind in ("tensor", "numpy"):
        return {kind: numbers[below]}
    if kind == "dict":
        return {kind: [[key, renumbered(item, numbers)] for key, item in below]}
    if kind in ("list", "tuple"):
        return {kind: [renumbered(item, numbers) for item in below]}
    return tree


def values_of(tree: Json, path: str = "") -> dict[str, str]:
    """Path and text of each value of the tree that is no tensor."""
    if isinstance(tree, dict) and {"tensor", "numpy", "per_rank"} & tree.keys():
        return {}
    if isinstance(tree, dict) and {"dict", "list", "tuple"} & tree.keys():
        found: dict[str, str] = {}
        for key, item in children(tree):
            found |= values_of(item, join(path, key))
        empty = not any(True for _ in children(tree))
        return {path: repr(tree)} if empty and path else found
    return {path: repr(decode_scalar(tree))}


def per_rank_numbers(tree: Json, path: str = "") -> dict[str, int]:
    """Path of each ``PerRank`` -> its number."""
    if isinstance(tree, dict) and "per_rank" in tree:
        return {path: tree["per_rank"]}
    found: dict[str, int] = {}
    for key, item in children(tree):
        found.update(per_rank_numbers(item, join(path, key)))
    return found


def decode_scalar(tree: Json) -> Any:
    """The value of a leaf of the tree that is not a tensor."""
    if not isinstance(tree, dict):
        return tree
    (kind, value), *_ = tree.items()
    return _DECODE[kind](value)


_DECODE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
    "number": unpack_number,
}
