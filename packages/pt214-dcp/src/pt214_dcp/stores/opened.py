"""Objects opened to be read, numbered as file descriptors are, but below zero.

What reads blocks works with numbers of open files; an object has no descriptor, so it gets a
number here, and the functions below take either.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from pt214_dcp import files
from pt214_dcp.stores.place import Place, Where

_numbers = itertools.count(-2, -1)
_objects: dict[int, tuple[Place, int]] = {}  # each with its size when it was opened


def open_to_read(where: Where) -> int:
    """As ``files.open_to_read``."""
    if isinstance(where, Path):
        return files.open_to_read(where)
    size_bytes = where.store.size(where.key)
    number = next(_numbers)
    _objects[number] = where, size_bytes
    return number


def close(number: int) -> None:
    """As ``os.close``."""
    if number >= 0:
        os.close(number)
    else:
        del _objects[number]


def size(number: int) -> int:
    """Bytes of an open file."""
    return os.fstat(number).st_size if number >= 0 else _objects[number][1]


def pread(number: int, size_bytes: int, at: int) -> bytes:
    """As ``os.pread``."""
    if number >= 0:
        return os.pread(number, size_bytes, at)
    place, end = _objects[number]
    count = max(0, min(size_bytes, end - at))
    return place.store.read(place.key, at, count) if count else b""


def preadv(number: int, into: Sequence[memoryview], at: int) -> int:
    """As ``os.preadv``: one range read, whatever the number of buffers."""
    if number >= 0:
        return os.preadv(number, into, at)
    place, end = _objects[number]
    if len(into) == 1 and at + len(into[0]) <= end:
        return place.store.read_into(place.key, at, into[0])
    data = memoryview(pread(number, sum(map(len, into)), at))
    done = 0
    for view in into:
        count = min(len(view), len(data) - done)
        view[:count] = data[done : done + count]
        done += count
    return done
