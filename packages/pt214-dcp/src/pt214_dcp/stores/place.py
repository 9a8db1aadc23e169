"""A place in a store, used as a folder's path is: ``place / "step-0000000100"``.

The functions below take either a path or a place, so that the rest of the part need not ask.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pt214_dcp import files
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.stores.base import Store, checked_name


@dataclass(frozen=True)
class Place:
    """A name in a store, or, with an empty one, the store's root.

    Attributes:
        store: that holds it.
        key: name within the store.
    """

    store: Store
    key: str = ""

    def __truediv__(self, name: str) -> Place:
        return Place(self.store, checked_name(f"{self.key}/{name}" if self.key else name))

    def __str__(self) -> str:
        return f"{self.store.url}/{self.key}" if self.key else self.store.url

    @property
    def name(self) -> str:
        """The last part of its key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Place:
        """What holds it; the root of the store holds itself."""
        return Place(self.store, self.key.rpartition("/")[0])


Where = Path | Place


def read_record(where: Where) -> bytes:
    """As ``files.read_record``."""
    if isinstance(where, Path):
        return files.read_record(where)
    data = where.store.read(where.key, 0, files.RECORD_LIMIT_BYTES + 1)
    if len(data) > files.RECORD_LIMIT_BYTES:
        raise ChunkCorrupt(f"{where}: a record has at most {files.RECORD_LIMIT_BYTES} bytes")
    return data


def read_range(where: Where, at: int, size_bytes: int) -> bytes:
    """As ``files.read_range``."""
    if isinstance(where, Path):
        return files.read_range(where, at, size_bytes)
    return where.store.read(where.key, at, size_bytes)


def write_new(where: Where, data: bytes, check: Callable[[], None]) -> None:
    """As ``files.write_new``."""
    if isinstance(where, Path):
        files.write_new(where, data, check)
    else:
        where.store.write_new(where.key, [memoryview(data)], check, len(data))


def make_folder(where: Where) -> None:
    """As ``files.make_folder``; a store needs none."""
    if isinstance(where, Path):
        files.make_folder(where)


def sync_folder(where: Where) -> None:
    """As ``files.sync_folder``."""
    if isinstance(where, Path):
        files.sync_folder(where)
    else:
        where.store.sync(where.key)


def children(where: Where) -> Iterator[Where]:
    """What lies in a folder, or, in a store, the first parts of the names below a place."""
    if isinstance(where, Path):
        if where.is_dir():
            yield from where.iterdir()
        return
    begin = len(where.key) + 1 if where.key else 0
    names = (entry.name[begin:].partition("/")[0] for entry in where.store.list(where.key))
    for name in dict.fromkeys(names):
        yield where / name


def remove(where: Where) -> None:
    """Remove a folder, or all names below a place, its root record first; what is gone is gone."""
    if isinstance(where, Path):
        shutil.rmtree(where, ignore_errors=True)
        return
    names = [entry.name for entry in where.store.list(where.key)]
    roots = [name for name in names if name.rpartition("/")[0] == where.key]
    if roots:
        where.store.delete(roots)  # first, so that nobody begins to read what is half gone
    where.store.delete([name for name in names if name not in roots])
