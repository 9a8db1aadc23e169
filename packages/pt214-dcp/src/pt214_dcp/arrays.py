"""numpy's arrays and numbers as data, without importing numpy: who has one has imported it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from pt214_dcp.errors import NotData

# Kinds of numpy that are numbers and that torch has too; others hold objects, texts or dates.
_KINDS = "biufc"


def is_array(value: Any) -> bool:
    """Whether ``value`` is a numpy array (not one of its subclasses, which mean more)."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_number(value: Any) -> bool:
    """Whether ``value`` is one of numpy's scalars."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def tensor_of(array: Any, path: str, *, fill: bool) -> torch.Tensor:
    """A tensor over the memory of ``array``, so that to fill it is to fill the array.

    Raises:
        NotData: an array of objects, texts, dates or foreign byte order, or one to ``fill`` that is
            read-only.
    """
    if array.dtype.kind not in _KINDS or not array.dtype.isnative:
        raise NotData(
            f"{path}: a numpy array of {array.dtype} is not data; save numbers of this machine's "
            "byte order"
        )
    if any(stride < 0 for stride in array.strides):
        raise NotData(f"{path}: a numpy array that runs backwards; save numpy.ascontiguousarray()")
    if not array.flags.writeable:
        if fill:
            raise NotData(f"{path}: a read-only numpy array can't be filled; pass a copy of it")
        array = array.copy()  # torch warns of the memory of an array that may not change
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise NotData(f"{path}: torch has no dtype for a numpy array of {array.dtype}") from error


def pack_number(value: Any, path: str) -> list[Any]:
    """Dtype and bytes of one of numpy's numbers."""
    if value.dtype.kind not in _KINDS:
        raise NotData(f"{path}: a numpy {value.dtype} is not data; convert it to a str or an int")
    return [value.dtype.newbyteorder("<").str, value.tobytes().hex()]


def unpack_number(packed: Any) -> Any:
    """Inverse of ``pack_number``.

    Raises:
        ModuleNotFoundError: the checkpoint holds numpy's numbers, and there is no numpy here.
    """
    import numpy as np  # what was saved from numpy comes back as numpy

    dtype, text = packed
    kind = np.dtype(str(dtype))
    if kind.kind not in _KINDS:
        raise ValueError(f"not the dtype of a number: {dtype!r}")
    return np.frombuffer(bytes.fromhex(text), kind)[0]
