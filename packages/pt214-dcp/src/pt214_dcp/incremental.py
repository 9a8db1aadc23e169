"""Blocks that an earlier checkpoint already holds need not be written again.

    base: hash of each block -> where it lies          new: the same hash -> that very place

Each rank looks into the manifest that the same rank wrote for the base. The base's data files are
hard-linked into the new generation: so no checkpoint ever leans on another, each can be removed at
any time, and the disk frees a file with its last link. What a link costs is that dead blocks of a
file stay as long as one of its blocks is wanted; ``compact`` writes such a checkpoint anew.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pt214_dcp.blocks import Known
from pt214_dcp.checkpoint import Checkpoint
from pt214_dcp.errors import SaveFailed
from pt214_dcp.manifest import HASH_BYTES, linked_name
from pt214_dcp.stores.place import Where

MOST_FILES = 64  # that one manifest leans on; a longer chain is ended by a full save. Not tuned.


@dataclass(frozen=True, slots=True)
class Base:
    """What a rank knows of the base.

    Attributes:
        files: data files that hold its blocks.
        names: what they are called in the new generation.
        known: hash of a block -> 1 + index in ``files``, offset; None for a save in full.
    """

    files: tuple[Where, ...] = ()
    names: tuple[str, ...] = ()
    known: Known | None = None


def base_of(checkpoint: Checkpoint, rank: int) -> Base:
    """What ``rank`` can take from ``checkpoint``: what the same rank saved in it."""
    if rank >= checkpoint.commit.world_size:
        return Base(known={})
    manifest = checkpoint.manifest(rank)
    if not manifest.hashes or len(manifest.files) >= MOST_FILES:
        return Base(known={})
    files = [checkpoint.data_path(manifest, file) for file in range(len(manifest.files) + 1)]
    names = [linked_name(checkpoint.commit.generation, file.name) for file in files]
    known: dict[bytes, tuple[int, int]] = {}
    for number in range(len(manifest.checksums)):
        name = manifest.hashes[number * HASH_BYTES : (number + 1) * HASH_BYTES]
        known[name] = (1 + manifest.file_of(number), manifest.starts[number])
    return Base(tuple(files), tuple(names), known)


def link_used(base: Base, folder: Where, block_files: Sequence[int]) -> tuple[Sequence[int], Base]:
    """Link what the blocks lean on into ``folder``; number the files anew without the rest.

    Args:
        base: what could be used.
        folder: of the new generation.
        block_files: of each block, 0 or 1 + index in ``base.files``.

    Raises:
        SaveFailed: the file system has no hard links, or the base is gone.
    """
    used = sorted(set(block_files) - {0})
    number = {0: 0} | {old: new for new, old in enumerate(used, start=1)}
    for old in used:
        file, name = base.files[old - 1], base.names[old - 1]
        assert isinstance(file, Path)  # a save with a base in a store was refused
        assert isinstance(folder, Path)
        try:
            os.link(file, folder / name, follow_symlinks=False)
        except OSError as error:
            raise SaveFailed(
                f"{file}: can't be linked into {folder}: {error.strerror}; an incremental save "
                "needs its base on the same file system, with hard links: save without base"
            ) from error
    names = tuple(base.names[old - 1] for old in used)
    return [number[file] for file in block_files], Base(names=names)
