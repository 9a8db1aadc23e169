"""Any other store, by fsspec.

fsspec has no conditional write: the root's bytes are compared just before they are replaced, so a
saver that is clearly late is refused, but of two at the very same moment both may believe that they
won. A warning says so once a store.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from pt214_dcp import files
from pt214_dcp.errors import BadPath, CheckpointError, CommitConflict, StoreError
from pt214_dcp.stores.base import Entry, checked_name
from pt214_dcp.stores.objects import joined
from pt214_dcp.stores.options import StoreOptions

logger = logging.getLogger(__name__)


def open_fsspec(url: str, options: StoreOptions) -> FsspecStore:
    """The store at ``url``.

    Raises:
        BadPath: fsspec knows no such scheme, or lacks a package for it.
    """
    try:
        import fsspec  # type: ignore[import-untyped]  # it ships no types
    except ImportError as error:
        raise ModuleNotFoundError(
            f'{url}: this scheme needs fsspec: pip install "pt214-dcp[fsspec]"'
        ) from error
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options.config)
    except (ImportError, ValueError) as error:
        raise BadPath(f"{url}: fsspec can't open it: {error}") from error
    logger.warning(
        "%s: fsspec can't commit conditionally: let only one job save to a path at a time", url
    )
    return FsspecStore(filesystem, str(root).rstrip("/"), url, options)


class FsspecStore:
    """A ``Store`` over an fsspec file system; its cache of listings is never trusted."""

    def __init__(self, filesystem: Any, root: str, url: str, options: StoreOptions) -> None:
        self._fs, self._root, self._options = filesystem, root, options
        self._url = url.rstrip("/")

    @property
    def url(self) -> str:
        """As ``Store``."""
        return self._url

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """As ``Store``."""
        end = self.size(name)
        stop = end if size is None else min(end, offset + size)
        if offset >= stop:
            return b""
        with self._told("read", name):
            return bytes(self._fs.cat_file(self._at(name), start=offset, end=stop))

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """As ``Store``."""
        data = self.read(name, offset, len(into))
        into[: len(data)] = data
        return len(data)

    def size(self, name: str) -> int:
        """As ``Store``."""
        with self._told("look at", name):
            self._fs.invalidate_cache()
            found = self._fs.info(self._at(name))
        if found["type"] != "file":
            raise FileNotFoundError(f"{self._url}/{name}: no such file")
        return int(found["size"])

    def write_new(
        self,
        name: str,
        parts: Iterable[memoryview],
        check: Callable[[], None],
        size_bytes: int | None = None,
    ) -> int:
        """As ``Store``; whether it is durable then is up to the file system behind fsspec."""
        with contextlib.suppress(FileNotFoundError):
            self.size(name)
            raise FileExistsError(f"{self._url}/{name}: something lies here already")
        total, path = 0, self._at(name)
        with self._told("write", name):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                with self._fs.open(path, "wb") as file:
                    for part in joined(parts, self._options.part_bytes, check):
                        total += file.write(part)
            except BaseException:  # leaving the block has closed the file, and so kept a part of it
                with contextlib.suppress(OSError):
                    self._fs.rm_file(path)
                raise
        found = self.size(name)
        if found != total:
            raise StoreError(f"{self._url}/{name}: {total} bytes were sent, {found} lie there")
        return total

    def read_root(self, name: str) -> tuple[bytes, str | None]:
        """As ``Store``."""
        try:
            data = self.read(name)
        except FileNotFoundError:
            return b"", None
        return data, files.digest(data).hex()

    def replace_root(self, name: str, data: bytes, expected: str | None) -> None:
        """As ``Store``, but see above."""
        if self.read_root(name)[1] != expected:
            raise CommitConflict(f"{self._url}/{name}: another saver committed here meanwhile")
        with self._told("commit", name):
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(self._at(name), data)

    def list(self, prefix: str) -> Iterator[Entry]:
        """As ``Store``."""
        top = self._at(prefix) if prefix else self._root
        with self._told("list", prefix):
            self._fs.invalidate_cache()
            found = self._fs.find(top, detail=True)
        for path, info in found.items():
            name = str(path)[len(self._root) :].strip("/")
            yield Entry(name, int(info["size"]), _modified_s(info))

    def delete(self, names: Sequence[str]) -> None:
        """As ``Store``."""
        for name in names:
            with self._told("delete", name), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

    def sync(self, prefix: str) -> None:
        """As ``Store``: nothing that fsspec could do."""

    def _at(self, name: str) -> str:
        return f"{self._root}/{checked_name(name)}"

    @contextlib.contextmanager
    def _told(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, CheckpointError):
            raise
        except OSError as error:
            raise StoreError(f"{self._url}/{name}: can't {verb}: {error}") from error


def _modified_s(info: dict[str, Any]) -> float:
    """File systems name and type the time differently; unknown counts as now, so nothing is old."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return float("inf")
