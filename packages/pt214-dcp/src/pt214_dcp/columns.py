"""Columns of numbers as bytes: what msgpack would write one by one goes out in one piece.

Always little-endian, whatever the machine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

Column = array  # of a fixed width


def pack(code: str, values: Iterable[int]) -> bytes:
    """``values`` as little-endian numbers of array's type ``code`` ("B", "I", "q"...)."""
    column = (
        values if isinstance(values, array) and values.typecode == code else array(code, values)
    )
    if sys.byteorder == "big":
        column = array(code, column)
        column.byteswap()
    return column.tobytes()


def unpack(code: str, data: Any) -> array[int]:
    """Inverse of ``pack``.

    Raises:
        ValueError: not bytes, or not a whole number of values.
    """
    if not isinstance(data, bytes):
        raise ValueError(f"a column is a {type(data).__name__}, not bytes")
    column: array[int] = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
