"""Object stores by obstore: S3, Google's, Azure's, and one in memory.

    up to one part     one PUT, If-None-Match
    more               multipart: parts copied from the caller's memory, some under way at once
    root               one PUT, If-None-Match when new, If-Match when replacing

obstore retries 5xx answers, dropped connections and timeouts with growing pauses; an answer that
ends midway is asked for again here. A retried request may meet its own first try, whose answer was
lost: so after a conflict what lies there is looked at, and if it is what was to be written, the
first try has come through.

Source: https://developmentseed.org/obstore/latest/api/put/
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pt214_dcp.errors import BadPath, CommitConflict, StoreError
from pt214_dcp.stores.base import Entry, checked_name
from pt214_dcp.stores.options import StoreOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_MOST_PARTS = 9000  # S3 takes 10,000 in one object; what is written may be a little more than told
_DELETE_AT_ONCE = 1000
_BROKEN = (
    "request or response body error"  # an answer that ended midway; obstore has no type for it
)
_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0
_Answer = TypeVar("_Answer")


class Objects:
    """A ``Store`` over an obstore store whose names all begin with its own prefix.

    Args:
        raw: made by obstore.
        url: of its root, for messages.
        options: part size and concurrency are used here.
    """

    def __init__(self, raw: ObjectStore, url: str, options: StoreOptions) -> None:
        self._raw, self._url, self._options = raw, url.rstrip("/"), options

    @property
    def url(self) -> str:
        """As ``Store``."""
        return self._url

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """As ``Store``."""
        return bytes(self._range(name, offset, size))

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """As ``Store``."""
        data = self._range(name, offset, len(into))
        into[: len(data)] = data
        return len(data)

    def _range(self, name: str, offset: int, size: int | None) -> memoryview:
        import obstore

        def read() -> memoryview:
            if size == 0:  # no range that a server would take
                obstore.head(self._raw, name)
                return memoryview(b"")
            if size is not None and offset:
                return memoryview(obstore.get_range(self._raw, name, start=offset, length=size))
            # An answer's length is known before its body: so a record that is too long is refused.
            found = obstore.get(self._raw, name)
            if size is not None and offset + size < found.meta["size"]:
                return memoryview(obstore.get_range(self._raw, name, start=offset, length=size))
            return memoryview(found.bytes())[offset:]

        return self._whole("read", name, read)

    def _whole(
        self,
        verb: str,
        name: str,
        ask: Callable[[], _Answer],
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> _Answer:
        """What ``ask`` returns; again, with growing pauses, if an answer ends midway."""
        from obstore import exceptions

        for attempt in range(self._options.max_retries):
            with self._told(verb, name):
                try:
                    return ask()
                except exceptions.GenericError as error:
                    if _BROKEN not in str(error) or not may_repeat():
                        raise
            time.sleep(min(_PAUSE_S * 2**attempt, _MOST_PAUSE_S))
        with self._told(verb, name):
            return ask()

    def size(self, name: str) -> int:
        """As ``Store``."""
        import obstore

        with self._told("look at", name):
            return int(obstore.head(self._raw, name)["size"])

    def write_new(
        self,
        name: str,
        parts: Iterable[memoryview],
        check: Callable[[], None],
        size_bytes: int | None = None,
    ) -> int:
        """As ``Store``."""
        part_bytes = max(self._options.part_bytes, -(-(size_bytes or 0) // _MOST_PARTS))
        cut = joined(parts, part_bytes, check)
        first, second = next(cut, b""), next(cut, None)
        if second is None:
            self._write_small(name, first)
            return len(first)
        with contextlib.suppress(FileNotFoundError):
            self.size(name)  # obstore takes no condition for a multipart upload
            raise FileExistsError(f"{self._url}/{name}: something lies here already")
        return self._write_large(name, _Body([first, second], cut), part_bytes)

    def _write_large(self, name: str, body: _Body, part_bytes: int) -> int:
        import obstore

        def put() -> None:
            obstore.put(
                self._raw, name, iter(body), use_multipart=True, chunk_size=part_bytes,
                max_concurrency=self._options.concurrency,
            )  # fmt: skip

        try:
            self._whole("write", name, put, lambda: not body.begun)
        except (FileNotFoundError, StoreError):
            with contextlib.suppress(FileNotFoundError, StoreError):
                if body.ended and self.size(name) == body.size_bytes:
                    return body.size_bytes  # the answer to its end was lost
            raise
        found = self.size(name)
        if found != body.size_bytes:
            sent = body.size_bytes
            raise StoreError(f"{self._url}/{name}: {sent} bytes were sent, {found} lie there")
        return found

    def _write_small(self, name: str, data: bytes) -> None:
        import obstore

        try:
            with self._told("write", name):
                obstore.put(self._raw, name, data, mode="create", use_multipart=False)
        except FileExistsError:
            if self.size(name) != len(data) or self.read(name) != data:
                raise

    def read_root(self, name: str) -> tuple[bytes, str | None]:
        """As ``Store``."""
        import obstore

        def read() -> tuple[bytes, str | None]:
            found = obstore.get(self._raw, name)
            return bytes(found.bytes()), found.meta["e_tag"]

        try:
            return self._whole("read", name, read)
        except FileNotFoundError:
            return b"", None

    def replace_root(self, name: str, data: bytes, expected: str | None) -> None:
        """As ``Store``."""
        import obstore

        try:
            with self._told("commit", name):
                mode: Any = "create" if expected is None else {"e_tag": expected}
                obstore.put(self._raw, name, data, mode=mode, use_multipart=False)
        except (FileExistsError, CommitConflict, StoreError) as error:
            with contextlib.suppress(StoreError):
                if self.read_root(name)[0] == data:
                    return
            if isinstance(error, StoreError):
                raise
            raise CommitConflict(
                f"{self._url}/{name}: another saver committed here since this save began; what it "
                "wrote stays, and nothing of this save does"
            ) from error

    def list(self, prefix: str) -> Iterator[Entry]:
        """As ``Store``."""
        import obstore

        with self._told("list", prefix):
            for page in obstore.list(self._raw, prefix or None):
                for found in page:
                    modified_s = found["last_modified"].timestamp()
                    yield Entry(found["path"], found["size"], modified_s)

    def delete(self, names: Sequence[str]) -> None:
        """As ``Store``."""
        import obstore

        for at in range(0, len(names), _DELETE_AT_ONCE):
            some = list(names[at : at + _DELETE_AT_ONCE])
            with self._told("delete", some[0]), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._raw, some)

    def sync(self, prefix: str) -> None:
        """As ``Store``: what a store has answered for is durable."""

    @contextlib.contextmanager
    def _told(self, verb: str, name: str) -> Iterator[None]:
        """Errors of obstore as ours, with the object's name in front."""
        from obstore import exceptions

        where = f"{self._url}/{name}" if name else self._url
        if name or verb != "list":
            checked_name(name)
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{where}: no such object") from error
        except exceptions.AlreadyExistsError as error:
            raise FileExistsError(f"{where}: something lies here already") from error
        except exceptions.PreconditionError as error:
            raise CommitConflict(f"{where}: another saver came first") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise BadPath(f"{where}: can't {verb}: {_first_line(error)}") from error
        except exceptions.BaseError as error:
            raise StoreError(f"{where}: can't {verb}: {_first_line(error)}") from error


class _Body:
    """Parts of an upload; it can begin again until the third of them is asked for.

    Args:
        first: parts that are here already.
        rest: all others.
    """

    def __init__(self, first: Sequence[bytes], rest: Iterator[bytes]) -> None:
        self._first, self._rest = first, rest
        self.begun = self.ended = False
        self.size_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        self.size_bytes = sum(map(len, self._first))
        yield from self._first
        self.begun, self._first = True, ()
        for part in self._rest:
            self.size_bytes += len(part)
            yield part
        self.ended = True


def joined(
    parts: Iterable[memoryview], part_bytes: int, check: Callable[[], None]
) -> Iterator[bytes]:
    """The same bytes in pieces of ``part_bytes``, the last one shorter; each is its own memory."""
    buffer = bytearray()
    for part in parts:
        at = 0
        while at < len(part):
            take = min(len(part) - at, part_bytes - len(buffer))
            buffer += part[at : at + take]
            at += take
            if len(buffer) == part_bytes:
                check()
                yield bytes(buffer)
                buffer.clear()
    check()
    if buffer:
        yield bytes(buffer)


def _first_line(error: Exception) -> str:
    """What obstore says, without the pages of debug output behind it."""
    return str(error).partition("\n\nDebug source")[0].replace("\n", " ")[:500]
