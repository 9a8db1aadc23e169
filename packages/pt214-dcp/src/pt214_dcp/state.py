"""What is data: a state dict becomes a tree of JSON and a flat list of tensors, and back.

    {"epoch": 3, "model": {"w": Tensor}}
        -> tree    {"dict": [["epoch", 3], ["model", {"dict": [["w", {"tensor": 0}]]}]]}
        -> tensors [Leaf("model/w", Tensor)]

Containers are dict, list and tuple; leaves are tensors, numpy arrays, None, bool, int, float,
complex, str, bytes and numpy's numbers. Everything else is refused by the path of its key: what is
not data would need a pickle. ``PerRank`` marks what each rank has for itself; it is kept apart.
Dicts are walked in the order of their sorted keys, so that ranks that filled one in another order
still number its tensors alike.
A key's path joins keys by ``/`` and writes whole numbers as ``[0]``; ``~``, ``/`` and a leading
``[`` inside a text key are written ``~0``, ``~1`` and ``~2`` (as JSON pointer does), and an empty
one ``~3``, so that two different places never share a path, and none has an empty one.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from pt214_dcp.arrays import is_array, is_number, pack_number, tensor_of
from pt214_dcp.compat import local_tensor
from pt214_dcp.errors import NotData
from pt214_dcp.per_rank import PerRank
from pt214_dcp.trees import Json, decode_scalar, join, kind_of

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
EXACT_INT = 1 << 53  # other readers of JSON keep whole numbers up to here


class Leaf(NamedTuple):
    """One tensor (plain or DTensor) and the path of its key."""

    key: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """What stands in one ``PerRank``: a tree of its own with tensors of its own."""

    key: str
    marker: PerRank
    tree: Json
    leaves: list[Leaf]


@dataclass(slots=True, eq=False)
class Flat:
    """A state dict taken apart.

    Attributes:
        tree: nesting and values; tensors and ``PerRank`` are numbered.
        leaves: the tensors that all ranks of a key group know.
        own: what each rank has for itself.
        fill: whether the tensors will be written to.
        kinds: as ``trees.kinds`` of the tree.
    """

    fill: bool = False
    tree: Json = None
    leaves: list[Leaf] = field(default_factory=list)
    own: list[Own] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)


def flatten(state: Any) -> tuple[Json, list[Leaf]]:
    """The tree and the tensors of ``state``, without what is ``PerRank``; nothing is copied.

    Raises:
        NotData: a value or key that is not data; the message has the path of its key.
    """
    flat = take_apart(state)
    return flat.tree, flat.leaves


def take_apart(state: Any, *, fill: bool = False) -> Flat:
    """Everything in ``state``; tensors are not copied.

    Args:
        state: nested data.
        fill: whether its tensors and arrays will be written to.

    Raises:
        NotData: a value or key that is not data; the message has the path of its key.
    """
    if not isinstance(state, dict):
        raise NotData(f"state_dict is a {_name(state)}; a dict is needed")
    flat = Flat(fill)
    try:
        flat.tree = _encode(state, "", flat, set())
    except RecursionError:
        raise NotData(
            "state_dict is nested too deeply; a few hundred levels are possible"
        ) from None
    return flat


def _encode(value: Any, path: str, flat: Flat, above: set[int]) -> Json:
    if isinstance(value, torch.Tensor):
        _check_tensor(value, path)
        flat.leaves.append(Leaf(path, value))
        flat.kinds[path] = "tensor"
        return {"tensor": len(flat.leaves) - 1}
    if isinstance(value, dict | list | tuple) and _is_container(value):
        if id(value) in above:
            raise NotData(f"{path}: this {_name(value)} contains itself; break the cycle")
        above.add(id(value))
        encoded = _encode_container(value, path, flat, above)
        above.discard(id(value))
        return encoded
    if is_array(value):
        flat.leaves.append(Leaf(path, tensor_of(value, path, fill=flat.fill)))
        flat.kinds[path] = "numpy"
        return {"numpy": len(flat.leaves) - 1}
    if isinstance(value, PerRank):
        below = Flat(flat.fill)
        below.tree = _encode(value.value, path, below, above)
        if below.own:
            raise NotData(f"{path}: a PerRank inside a PerRank; one is enough")
        flat.own.append(Own(path, value, below.tree, below.leaves))
        flat.kinds[path] = "PerRank"
        return {"per_rank": len(flat.own) - 1}
    scalar = _encode_scalar(value, path)
    flat.kinds[path] = "value"
    return scalar


def _encode_container(value: Any, path: str, flat: Flat, above: set[int]) -> Json:
    if path:
        kind = "dict" if isinstance(value, dict) else "list" if isinstance(value, list) else "tuple"
        flat.kinds[path + "/"] = kind
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                where = path or "the state dict"
                raise NotData(f"{where}: key {key!r} is a {_name(key)}; use str or int")
            if type(key) is str and not key.isascii() and not _is_text(key):
                where = path or "the state dict"
                raise NotData(f"{where}: key {key!r} is no valid Unicode; use another text")
        keys = sorted(value, key=_order)
        return {"dict": [[key, _encode(value[key], join(path, key), flat, above)] for key in keys]}
    kind = "list" if isinstance(value, list) else "tuple"
    items = [_encode(item, join(path, at), flat, above) for at, item in enumerate(value)]
    return {kind: items}


def _order(key: str | int) -> tuple[bool, str | int]:
    return isinstance(key, str), key


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
    if is_number(value):
        return {"number": pack_number(value, path)}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    raise NotData(
        f"{path}: a {_name(value)} is not data; allowed are tensors, DTensors, numpy arrays, dict, "
        "list, tuple, None, bool, int, float, complex, str and bytes"
    )


def replace_scalars(state: Any, tree: Json) -> Any:
    """Write the tree's scalars into ``state`` in place; return ``state`` or what replaces it.

    Tensors, arrays and ``PerRank`` stay the objects they are. A tuple holds its items for ever, so
    it is made anew. What ``tree`` lacks or has as another kind stays, as a partial load allows, and
    what ``state`` lacks is left out.
    """
    found = kind_of(tree)
    if isinstance(state, torch.Tensor | PerRank) or is_array(state):
        return state
    if isinstance(state, dict):
        for key, below in tree["dict"] if found == "dict" else ():
            if key in state:
                state[key] = replace_scalars(state[key], below)
        return state
    if isinstance(state, list | tuple) and _is_container(state):
        kind = "list" if isinstance(state, list) else "tuple"
        if found != kind:
            return state
        items = [replace_scalars(item, below) for item, below in zip(state, tree[kind])]  # noqa: B905  # a partial load may meet another length
        items += state[len(items) :]
        if isinstance(state, list):
            state[:] = items
            return state
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    return decode_scalar(tree) if found == "value" else state


def build(tree: Json, tensors: Sequence[Any], own: Sequence[Any] = ()) -> Any:
    """The value that ``flatten`` took apart, with ``tensors`` in the places of its leaves.

    Args:
        tree: as ``flatten`` made it.
        tensors: what to put for each tensor, in the order of the leaves.
        own: what to put for each ``PerRank``.
    """
    if not isinstance(tree, dict):
        return tree
    (kind, below), *_ = tree.items()
    if kind == "tensor":
        return tensors[below]
    if kind == "numpy":
        return tensors[below].numpy()
    if kind == "per_rank":
        return own[below]
    if kind == "dict":
        return {key: build(item, tensors, own) for key, item in below}
    if kind in ("list", "tuple"):
        items = [build(item, tensors, own) for item in below]
        return items if kind == "list" else tuple(items)
    return decode_scalar(tree)


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
    if tensor.is_nested:
        raise NotData(f"{path}: a nested tensor; save values() and offsets(), or unbind() it")
    _check_memory(tensor, path)


def _check_memory(tensor: torch.Tensor, path: str) -> None:
    """Refuse tensors whose bytes are elsewhere: freed by a wrapper, or wrapped by torch.func."""
    local = tensor if type(tensor) in PLAIN else local_tensor(tensor)
    try:
        address = local.data_ptr()
    except RuntimeError as error:
        raise NotData(
            f"{path}: a tensor without memory of its own, as inside torch.func.vmap or grad; save "
            "what the transformed function returns"
        ) from error
    if address == 0 and local.numel():
        raise NotData(
            f"{path}: its storage was freed, as fully_shard does between uses; save the sharded "
            "parameters (torch.distributed.checkpoint.state_dict gives them), or unshard() first"
        )


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
