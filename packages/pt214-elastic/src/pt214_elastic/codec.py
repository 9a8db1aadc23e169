"""State as bytes without pickle: a JSON outline plus one flat tensor of all tensors' bytes.

    {"model": {"w": tensor[2, 3]}, "lr": 0.1}
        ->  outline  ["d", [["model", ["d", [["w", ["t", "float32", [2, 3], 0, 24]]]]], ...]]
            flat     uint8[24 -> padded to 16]

Floats go through ``repr`` and come back bit for bit. Only data can be described, never code.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from typing import Any

import torch

from pt214_elastic.errors import StateError

ALIGN_BYTES = 16  # at least every dtype's item size, so that views of the flat tensor are aligned


def pack(tree: Any) -> tuple[bytes, torch.Tensor]:
    """The outline and the flat CPU tensor of ``tree``.

    Args:
        tree: dicts, lists, tuples, strings, numbers, ``None``, dtypes and strided tensors.

    Raises:
        StateError: something else is in it; the message names it.
    """
    parts: list[torch.Tensor] = []
    outline = _outline(tree, parts, "")
    text = json.dumps(outline, separators=(",", ":")).encode()
    return text, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def unpack(outline: bytes, flat: torch.Tensor) -> Any:
    """The tree that :func:`pack` was given, with tensors on the CPU.

    Raises:
        StateError: the outline is damaged.
    """
    try:
        return _build(json.loads(outline), flat)
    except (ValueError, TypeError, IndexError, AttributeError, RuntimeError) as error:
        raise StateError(f"received state is damaged: {error}") from error


def checksum(flat: torch.Tensor) -> int:
    """CRC-32 of a contiguous CPU tensor's bytes."""
    size_bytes = flat.numel() * flat.element_size()
    if size_bytes == 0:
        return 0
    return zlib.crc32((ctypes.c_char * size_bytes).from_address(flat.data_ptr()))


def _outline(item: Any, parts: list[torch.Tensor], path: str) -> Any:
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, torch.Tensor):
        return _tensor(item, parts, path)
    if isinstance(item, torch.dtype):
        return ["y", str(item).removeprefix("torch.")]
    if isinstance(item, dict):
        pairs = [
            [_outline(key, parts, path), _outline(value, parts, f"{path}/{key}")]
            for key, value in item.items()
        ]
        return ["d", pairs]
    if isinstance(item, list | tuple):
        rows = [_outline(value, parts, f"{path}/{n}") for n, value in enumerate(item)]
        return ["u" if isinstance(item, tuple) else "l", rows]
    raise StateError(
        f"tracked state {path or '/'} is a {type(item).__name__}: expected tensors, numbers,"
        " strings, None, and dicts, lists or tuples of them"
    )


def _tensor(item: torch.Tensor, parts: list[torch.Tensor], path: str) -> Any:
    if item.layout != torch.strided or item.is_quantized:
        raise StateError(f"tracked tensor {path} has layout {item.layout}: expected torch.strided")
    raw = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    start = sum(part.numel() for part in parts)
    name = str(item.dtype).removeprefix("torch.")
    parts.append(raw)
    if gap := -raw.numel() % ALIGN_BYTES:
        parts.append(torch.zeros(gap, dtype=torch.uint8))
    return ["t", name, list(item.shape), start, raw.numel()]


def _build(node: Any, flat: torch.Tensor) -> Any:
    if not isinstance(node, list):
        return node
    kind, rest = node[0], node[1:]
    match kind:
        case "d":
            return {_build(key, flat): _build(value, flat) for key, value in rest[0]}
        case "l":
            return [_build(item, flat) for item in rest[0]]
        case "u":
            return tuple(_build(item, flat) for item in rest[0])
        case "y":
            return _dtype(rest[0])
        case "t":
            name, shape, start, size_bytes = rest
            raw = flat[start : start + size_bytes].clone()
            return raw.view(_dtype(name)).reshape(shape)
    raise ValueError(f"node {kind!r} is unknown")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown")
    return found
