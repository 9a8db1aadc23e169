"""What one rank holds in memory, its own and its partner's, never more than a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pt214_dcp.errors import CommitConflict, StoreError
from pt214_dcp.stores.base import Entry

PIECE_BYTES = 8 << 20  # of one frame, and of one allocation; not tuned


@dataclass(slots=True)
class _Blob:
    """Pieces of ``PIECE_BYTES``, the last one shorter."""

    pieces: list[bytes] = field(default_factory=list)
    size_bytes: int = 0
    whole: bool = False
    modified_s: float = 0.0
    version: int = 0  # of a root


class Memory:
    """Names and their bytes.

    Args:
        budget_bytes: of all of them.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self.size_bytes = budget_bytes, 0
        self._blobs: dict[str, _Blob] = {}
        self._lock = threading.Lock()

    def append(self, name: str, piece: bytes, at: int) -> None:
        """Add the piece that begins at byte ``at`` to a name that is not whole yet.

        Raises:
            FileExistsError: it is.
            StoreError: the budget is used up, or pieces before it are not here.
        """
        with self._lock:
            blob = self._blobs.setdefault(name, _Blob())
            if blob.whole:
                raise FileExistsError(f"{name}: held already")
            if blob.size_bytes != at:
                raise StoreError(f"{name}: {blob.size_bytes} bytes are here, so none fit at {at}")
            self._take(len(piece))
            blob.pieces.append(piece)
            blob.size_bytes += len(piece)

    def finish(self, name: str) -> None:
        """From now on it can be read."""
        with self._lock:
            blob = self._blobs.setdefault(name, _Blob())
            if blob.whole:
                raise FileExistsError(f"{name}: held already")
            blob.whole, blob.modified_s = True, time.time()

    def read(self, name: str, offset: int, size: int) -> bytes:
        """At most ``size`` bytes from ``offset``; fewer where it or one of its pieces ends.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._lock:
            blob = self._whole(name)
            if offset >= blob.size_bytes or size <= 0:
                return b""
            number, at = divmod(offset, PIECE_BYTES)
            piece = blob.pieces[number]
        return piece[at : at + size] if at or size < len(piece) else piece

    def size(self, name: str) -> int:
        """Bytes of ``name``.

        Raises:
            FileNotFoundError: there is none.
        """
        with self._lock:
            return self._whole(name).size_bytes

    def root(self, name: str) -> tuple[bytes, int]:
        """A root record and its version, which is 0 if there is none."""
        with self._lock:
            blob = self._blobs.get(name)
            if blob is None or not blob.version:
                return b"", 0
            return b"".join(blob.pieces), blob.version

    def set_root(self, name: str, data: bytes, version: int) -> None:
        """Replace a root record by one of a later version.

        Raises:
            CommitConflict: there is one as late.
        """
        with self._lock:
            old = self._blobs.get(name, _Blob())
            if old.version >= version:
                raise CommitConflict(f"{name}: another saver committed here meanwhile")
            self._take(len(data) - old.size_bytes)
            self._blobs[name] = _Blob([data], len(data), True, time.time(), version)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Whole names below ``prefix``."""
        with self._lock:
            found = [(name, blob) for name, blob in self._blobs.items() if blob.whole]
        for name, blob in found:
            if not prefix or name.startswith(f"{prefix}/"):
                yield Entry(name, blob.size_bytes, blob.modified_s)

    def drop_parts(self) -> None:
        """Forget names that are not whole: their writers were lost."""
        with self._lock:
            parts = [name for name, blob in self._blobs.items() if not blob.whole]
        for name in parts:
            self.drop(name)

    def drop(self, name: str) -> None:
        """Forget a name, whole or not."""
        with self._lock:
            blob = self._blobs.pop(name, None)
            self.size_bytes -= blob.size_bytes if blob else 0

    def _whole(self, name: str) -> _Blob:
        blob = self._blobs.get(name)
        if blob is None or not blob.whole:
            raise FileNotFoundError(f"{name}: not held here")
        return blob

    def _take(self, size_bytes: int) -> None:
        if self.size_bytes + size_bytes > self.budget_bytes:
            raise StoreError(
                f"peers' memory: {self.size_bytes} bytes are held, {size_bytes} more would pass "
                f"the budget of {self.budget_bytes}: raise budget_bytes, or keep fewer checkpoints"
            )
        self.size_bytes += size_bytes
