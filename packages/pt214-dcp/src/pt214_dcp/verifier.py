"""Read every byte of a checkpoint and compare it with its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.manifest import BLOCK_BYTES
from pt214_dcp.reader import DataFiles, open_checkpoint
from pt214_dcp.staging import memory


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``verify`` has read.

    Attributes:
        tensors: how many.
        chunks: parts of tensors.
        size_bytes: bytes of data and manifests.
        errors: one message a damaged block, with file, key and offset.
    """

    tensors: int
    chunks: int
    size_bytes: int
    errors: tuple[str, ...] = ()


def verify(
    path: str | os.PathLike[str],
    *,
    raises: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Verified:
    """Check all checksums of the checkpoint at ``path``.

    Args:
        path: its folder.
        raises: raise on the first damaged block; else go on and list them in ``errors``.
        progress: called with bytes read and bytes in all, after each chunk.

    Raises:
        NotACheckpoint: nothing is committed there.
        ChunkCorrupt: a record is damaged, or a block is and ``raises`` is set.
    """
    checkpoint = open_checkpoint(Path(path).absolute())
    errors, read_bytes = [], 0
    chunks = [chunk for manifest in checkpoint.manifests for chunk in manifest.chunks]
    total_bytes = sum(chunk.size_bytes for chunk in chunks)
    buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with DataFiles(checkpoint) as data:
        for rank in range(len(checkpoint.manifests)):
            data.check_size(rank)
        for chunk in chunks:
            for block in range(len(chunk.crcs)):
                size = min(BLOCK_BYTES, chunk.size_bytes - block * BLOCK_BYTES)
                try:
                    data.read(chunk, block, memory(buffer[:size]))
                except ChunkCorrupt as error:
                    if raises:
                        raise
                    errors.append(str(error))
            read_bytes += chunk.size_bytes
            if progress is not None:
                progress(read_bytes, total_bytes)
    return Verified(
        len(checkpoint.tensors), len(chunks), checkpoint.commit.size_bytes, tuple(errors)
    )
