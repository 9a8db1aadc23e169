"""A rank's data file, from the windows of a save to an object, with the checksum of each block.

Nothing is written to a disk on the way: the store takes its parts from the tensors or the arena.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pt214_dcp.blocks import Known, Written, sort_out
from pt214_dcp.stores.place import Place


def upload(
    place: Place,
    header: bytes,
    known: Known | None,
    windows: Iterable[Sequence[memoryview]],
    check: Callable[[], None],
    size_bytes: int,
) -> tuple[Written, int]:
    """Write header and blocks to ``place``.

    Args:
        place: a new name.
        header: the first bytes.
        known: blocks that need not be written; None writes all.
        windows: of blocks; the memory of one may change once the next is asked for.
        check: called often; raises to stop.
        size_bytes: of all blocks.

    Returns:
        What is known of the blocks, and the object's size.

    Raises:
        FileExistsError: something lies there.
        StoreError: what the store answers, retries included.
    """
    written, at = Written(), len(header)

    def parts() -> Iterator[memoryview]:
        nonlocal at
        yield memoryview(header)
        for blocks in windows:
            found, new = sort_out(blocks, at, known)
            written.extend(found)
            at += sum(map(len, new))
            yield from new

    place.store.write_new(place.key, parts(), check, len(header) + size_bytes)
    return written, at
