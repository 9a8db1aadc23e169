"""Read every byte of a checkpoint and compare it with its checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pt214_dcp.arena import memory
from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.data_files import DataFiles, check_header
from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.manifest import BLOCK_BYTES
from pt214_dcp.stores.place import Place
from pt214_dcp.stores.resolve import where


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
    path: str | os.PathLike[str] | Place,
    *,
    raises: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Verified:
    """Check all checksums of the checkpoint at ``path``.

    Args:
        path: its folder, or a URL, as for ``save``.
        raises: raise on the first damaged block; else go on and list them in ``errors``.
        progress: called with bytes read and bytes in all, after each chunk.

    Raises:
        NotACheckpoint: nothing is committed there.
        ChunkCorrupt: a record is damaged, or a block is and ``raises`` is set.
    """
    checkpoint = open_checkpoint(where(path))
    errors: list[str] = []
    chunks, read_bytes = 0, 0
    manifests = list(checkpoint.manifests())
    total_bytes = sum(sum(manifest.block_sizes) for manifest in manifests)
    buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    with DataFiles(checkpoint, patient=True) as data:
        for manifest in manifests:
            try:
                fd = data.open(manifest)
                check_header(checkpoint.data_path(manifest), fd, manifest)
            except ChunkCorrupt as error:
                if raises:
                    raise
                errors.append(str(error))
            for chunk in manifest.chunks:
                chunks += 1
                for number in range(chunk.first_block, chunk.first_block + chunk.blocks):
                    try:
                        (run,) = data.runs(manifest, number, 1, chunk.tensor)
                        data.read([run], [memory(buffer[: run.size_bytes])])
                    except ChunkCorrupt as error:
                        if raises:
                            raise
                        errors.append(str(error))
                read_bytes += chunk.size_bytes
                if progress is not None:
                    progress(read_bytes, total_bytes)
    return Verified(len(checkpoint.tensors), chunks, checkpoint.commit.size_bytes, tuple(errors))
