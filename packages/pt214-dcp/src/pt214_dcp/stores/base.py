"""What a checkpoint asks of the place where it is kept.

    write_new rank files -> write_new index -> replace_root COMMIT.json      the only commit

All names but the root's are new and never written twice. The root is replaced as a whole and only
if nobody else replaced it meanwhile, so of two savers on one path exactly one wins. Names are
relative to the store, with ``/`` between their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from pt214_dcp.errors import BadPath


class Entry(NamedTuple):
    """One name in a store.

    Attributes:
        name: relative to the store.
        size_bytes: of its data.
        modified_s: when it was written, in seconds of the store's own clock since 1970.
    """

    name: str
    size_bytes: int
    modified_s: float


class Store(Protocol):
    """Every method may raise StoreError, which names the store and the name within."""

    @property
    def url(self) -> str:
        """Of the store's root, for messages."""

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """Up to ``size`` bytes from byte ``offset``, or all that follow; fewer where it ends.

        Raises:
            FileNotFoundError: there is none.
        """

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """Fill ``into``; return how many bytes there were.

        Raises:
            FileNotFoundError: there is none.
        """

    def size(self, name: str) -> int:
        """Bytes of its data.

        Raises:
            FileNotFoundError: there is none.
        """

    def write_new(
        self,
        name: str,
        parts: Iterable[memoryview],
        check: Callable[[], None],
        size_bytes: int | None = None,
    ) -> int:
        """Write ``parts`` end to end under a new name; when it returns, all is kept durably.

        Args:
            name: nothing may lie there.
            parts: the memory of one may change as soon as the next is asked for.
            check: called often; raises to stop, and nothing is left behind.
            size_bytes: about how much will come, if that is known.

        Returns:
            Bytes written.

        Raises:
            FileExistsError: something lies there.
        """

    def read_root(self, name: str) -> tuple[bytes, str | None]:
        """All bytes, and a version for ``replace_root``; no bytes and None if there is none."""

    def replace_root(self, name: str, data: bytes, expected: str | None) -> None:
        """Replace all bytes at once, if the version is still the ``expected`` one.

        Args:
            name: of the root.
            data: all of it.
            expected: as ``read_root`` returned it; None if nothing lay there.

        Raises:
            CommitConflict: another saver came first.
        """

    def list(self, prefix: str) -> Iterator[Entry]:
        """All names that lie in ``prefix``, which is a name without the ``/`` at its end."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove names; those that are gone are no error."""

    def sync(self, prefix: str) -> None:
        """Make names in ``prefix`` durable, where that takes more than to write them."""


def checked_name(name: str) -> str:
    """``name``, if it stays within the store.

    Raises:
        BadPath: it is absolute, empty, or has ``.`` or ``..`` in it.
    """
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise BadPath(f"{name!r} is no name within a store: no part may be empty, '.' or '..'")
    return name
