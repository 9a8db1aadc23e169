"""A folder as a store, by the rules of ``files``: new names only, fsynced, no symlink followed.

    replace_root: temporary record fsynced -> rename -> folder fsynced

A file system has no conditional rename: the version is compared just before it, so that a saver
that is clearly late is refused, but two at the very same moment are not told apart.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from pt214_dcp import files
from pt214_dcp.blocks import write_all
from pt214_dcp.errors import CommitConflict
from pt214_dcp.stores.base import Entry, checked_name


class Folder:
    """A ``Store`` in a folder.

    Args:
        path: of the folder; made when first written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def url(self) -> str:
        """As ``Store``."""
        return str(self._path)

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """As ``Store``."""
        count = self.size(name) - offset if size is None else size
        data = bytearray(max(0, count))
        return bytes(data[: self.read_into(name, offset, memoryview(data))])

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """As ``Store``."""
        fd = files.open_to_read(self._at(name))
        try:
            done = 0
            while done < len(into):
                count = os.preadv(fd, [into[done:]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            os.close(fd)

    def size(self, name: str) -> int:
        """As ``Store``."""
        fd = files.open_to_read(self._at(name))
        try:
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def write_new(
        self,
        name: str,
        parts: Iterable[memoryview],
        check: Callable[[], None],
        size_bytes: int | None = None,
    ) -> int:
        """As ``Store``."""
        path, at = self._at(name), 0
        files.make_folder(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for part in parts:
                at = write_all(fd, [part], at, check)
            check()
            os.fsync(fd)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return at

    def read_root(self, name: str) -> tuple[bytes, str | None]:
        """As ``Store``."""
        try:
            data = self.read(name)
        except FileNotFoundError:
            return b"", None
        return data, files.digest(data).hex()

    def replace_root(self, name: str, data: bytes, expected: str | None) -> None:
        """As ``Store``, but see above."""
        temporary = f"{name}.{uuid.uuid4().hex}"
        self.write_new(temporary, [memoryview(data)], lambda: None)
        try:
            if self.read_root(name)[1] != expected:
                raise CommitConflict(f"{self._at(name)}: another saver committed here meanwhile")
            os.rename(self._at(temporary), self._at(name))
        except BaseException:
            self._at(temporary).unlink(missing_ok=True)
            raise
        files.sync_folder(self._at(name).parent)

    def list(self, prefix: str) -> Iterator[Entry]:
        """As ``Store``."""
        top = self._at(prefix) if prefix else self._path
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    found = path.lstat()
                    relative = path.relative_to(self._path).as_posix()
                    yield Entry(relative, found.st_size, found.st_mtime)

    def delete(self, names: Sequence[str]) -> None:
        """As ``Store``; folders that become empty go, too."""
        for name in names:
            path = self._at(name)
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty yet
                while (path := path.parent) != self._path:
                    path.rmdir()

    def sync(self, prefix: str) -> None:
        """As ``Store``."""
        files.sync_folder(self._at(prefix) if prefix else self._path)

    def _at(self, name: str) -> Path:
        return self._path / checked_name(name)
