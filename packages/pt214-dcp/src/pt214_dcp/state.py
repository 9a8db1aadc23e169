"""What is data: a state dict becomes a tree of JSON and a flat list of tensors, and back.

    {"epoch": 3, "model": {"w": Tensor}}
        -> tree    {"dict": [["epoch", 3], ["model", {"dict": [["w", {"tensor": 0}]]}]]}
        -> tensors [Leaf("model/w", Tensor)]

Containers are dict, list and tuple; leaves are tensors, None, bool, int, float, complex, str and
bytes. Everything else is refused by the path of its key: what is not data would need a pickle.
A key's path joins keys by ``/`` and writes whole numbers as ``[0]``; ``~``, ``/`` and a leading
``[`` inside a text key are written ``~0``, ``~1`` and ``~2`` (as JSON pointer does), so that two
different places never share a path.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pt214_dcp.errors import NotData

Json = Any  # what json.dumps takes
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
EXACT_INT = 1 << 53  # other readers of JSON keep whole numbers up to here


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One tensor (plain or DTensor) and the path of its key."""

    key: str
    tensor: torch.Tensor


def flatten(state: Any) -> tuple[Json, list[Leaf]]:
    """Return the tree and the tensors of ``state``; tensors are not copied.

    Raises:
        NotData: a value or key that is not data; the message has the path of its key.
    """
    if not isinstance(state, dict):
        raise NotData(f"state_dict is a {_name(state)}; a dict is needed")
    leaves: list[Leaf] = []
    return _encode(state, "", leaves, set()), leaves


def join(prefix: str, key: str | int) -> str:
    """Path of ``key`` below ``prefix``."""
    if isinstance(key, int):
        text = f"[{key}]"
    else:
        text = key.replace("~", "~0").replace("/", "~1")
        text = "~2" + text[1:] if text.startswith("[") else text
    return f"{prefix}/{text}" if prefix else text


def _encode(value: Any, path: str, leaves: list[Leaf], above: set[int]) -> Json:
    if isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        leaves.append(Leaf(path, value))
        return {"tensor": len(leaves) - 1}
    if isinstance(value, dict | list | tuple) and _is_container(value):
        if id(value) in above:
            raise NotData(f"{path}: this {_name(value)} contains itself; break the cycle")
        above.add(id(value))
        encoded = _encode_container(value, path, leaves, above)
        above.discard(id(value))
        return encoded
    return _encode_scalar(value, path)


def _encode_container(value: Any, path: str, leaves: list[Leaf], above: set[int]) -> Json:
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            if type(key) not in (str, int):
                where = path or "the state dict"
                raise NotData(f"{where}: key {key!r} is a {_name(key)}; use str or int")
            pairs.append([key, _encode(item, join(path, key), leaves, above)])
        # By kind and value: two ranks that filled a dict in another order still agree.
        return {"dict": sorted(pairs, key=lambda pair: (isinstance(pair[0], str), pair[0]))}
    kind = "list" if isinstance(value, list) else "tuple"
    items = [_encode(item, join(path, at), leaves, above) for at, item in enumerate(value)]
    return {kind: items}


def _encode_scalar(value: Any, path: str) -> Json:
    kind = type(value)
    if value is None or kind is bool or (kind is int and abs(value) <= EXACT_INT):
        return value
    if kind is int:
        return {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is str:
        # surrogatepass: a text that is no valid Unicode is still data, and must come back as is
        return value if value.isprintable() else {"str": _base64(_utf8(value))}
    if kind is bytes:
        return {"bytes": _base64(value)}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    raise NotData(
        f"{path}: a {_name(value)} is not data; allowed are tensors, DTensors, dict, list, tuple, "
        "None, bool, int, float, complex, str and bytes"
    )


def decode_scalar(tree: Json) -> Any:
    """The value of a leaf of the tree that is not a tensor."""
    if not isinstance(tree, dict):
        return tree
    (kind, value), *_ = tree.items()
    return _DECODE[kind](value)


def replace_scalars(state: Any, tree: Json) -> Any:
    """Write the tree's scalars into ``state`` in place; return ``state`` or what replaces it.

    Tensors stay the objects they are. A tuple holds its items for ever, so it is made anew.
    The caller has checked that both have the same keys.
    """
    if isinstance(state, torch.Tensor):
        return state
    if isinstance(state, dict):
        for key, below in tree["dict"]:
            state[key] = replace_scalars(state[key], below)
        return state
    if isinstance(state, list):
        state[:] = [replace_scalars(*pair) for pair in zip(state, tree["list"], strict=True)]
        return state
    if isinstance(state, tuple):
        items = [replace_scalars(*pair) for pair in zip(state, tree["tuple"], strict=True)]
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    return decode_scalar(tree)


def build(tree: Json, tensors: Sequence[Any]) -> Any:
    """The value that ``flatten`` took apart, with ``tensors`` in the places of its leaves.

    Args:
        tree: as ``flatten`` made it.
        tensors: what to put for each tensor, in the order of the leaves.
    """
    if not isinstance(tree, dict):
        return tree
    (kind, below), *_ = tree.items()
    if kind == "tensor":
        return tensors[below]
    if kind == "dict":
        return {key: build(item, tensors) for key, item in below}
    if kind in ("list", "tuple"):
        items = [build(item, tensors) for item in below]
        return items if kind == "list" else tuple(items)
    return decode_scalar(tree)


def kinds(tree: Json, path: str = "") -> dict[str, str]:
    """Path of each leaf and of each empty container -> its kind, to compare two trees."""
    if isinstance(tree, dict):
        if "dict" in tree:
            below: Sequence[tuple[str | int, Json]] = tree["dict"]
        elif "list" in tree or "tuple" in tree:
            below = list(enumerate(tree.get("list") or tree.get("tuple") or []))
        else:
            return {path: "tensor" if "tensor" in tree else "value"}
        kind = next(iter(tree))
        found = {} if path == "" else {path + "/": kind}
        for key, item in below:
            found.update(kinds(item, join(path, key)))
        return found
    return {path: "value"}


def _is_container(value: Any) -> bool:
    if not isinstance(value, tuple):
        return True
    return type(value) in (tuple, torch.Size) or hasattr(value, "_fields")


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    # Names, not classes: importing DTensor costs time that a run without one need not pay.
    if type(tensor) not in PLAIN and type(tensor).__name__ != "DTensor":
        raise NotData(f"{path}: tensor subclass {_name(tensor)}; save the plain tensors it wraps")
    if tensor.layout != torch.strided:
        raise NotData(f"{path}: a tensor of layout {tensor.layout}; save its dense parts instead")
    if tensor.is_quantized:
        raise NotData(f"{path}: a quantized tensor; save int_repr(), scale and zero point instead")
    if tensor.device.type == "meta":
        raise NotData(f"{path}: a tensor on the meta device holds no data; materialise it first")


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


_DECODE: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "complex": lambda pair: complex(float(pair[0]), float(pair[1])),
}
