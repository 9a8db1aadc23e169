"""All that a checkpoint holds, under one name each, so that two can be compared.

    every key group's values, kinds of containers and tensors  +  every rank's ``PerRank``

A key that several key groups hold is named ``key (key group 1)`` from the second on; what stands in
a ``PerRank`` is named ``key (rank 0)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch

from pt214_dcp import trees
from pt214_dcp.checkpoint import Checkpoint
from pt214_dcp.data_files import DataFiles
from pt214_dcp.find import Finder
from pt214_dcp.layout import whole_box
from pt214_dcp.loader import plan_box
from pt214_dcp.manifest import Chunk, Manifest
from pt214_dcp.reads import Reads
from pt214_dcp.staging import bits
from pt214_dcp.table import TensorRecord
from pt214_dcp.trees import Json


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that was not read yet.

    Attributes:
        kind: "tensor" or "numpy".
        record: dtype and shape.
        read: reads and checks it.
    """

    kind: str
    record: TensorRecord
    read: Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Contents:
    """What ``contents`` found.

    Attributes:
        texts: name -> value as text; name of a container with ``/`` at its end -> its kind.
        tensors: by name.
    """

    texts: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)


def contents(checkpoint: Checkpoint) -> Contents:
    """List what ``checkpoint`` holds; no tensor is read.

    Raises:
        ChunkCorrupt: a record is damaged.
    """
    found = Contents()
    for group, table in enumerate(checkpoint.tables):
        kinds = trees.kinds(table.tree)
        finder = Finder(checkpoint, group, 0)
        for name, text in _texts(table.tree, kinds):
            if found.texts.setdefault(name, text) != text:
                found.texts[f"{name} (key group {group})"] = text
        for key, record in zip(table.keys, table.tensors, strict=True):
            if key:
                name = f"{key} (key group {group})" if key in found.tensors else key
                read = partial(_read, checkpoint, group, finder, key)
                found.tensors[name] = Stored(kinds[key], record, read)
    for manifest in checkpoint.manifests():
        if manifest.own:
            _add_own(found, checkpoint, manifest)
    return found


def _texts(tree: Json, kinds: dict[str, str], path: str = "") -> Iterator[tuple[str, str]]:
    yield from trees.values_of(tree, path).items()
    yield from ((name, kind) for name, kind in kinds.items() if name.endswith("/"))


def _add_own(found: Contents, checkpoint: Checkpoint, manifest: Manifest) -> None:
    """What one rank has for itself."""
    table, rank = checkpoint.table(manifest.group), f" (rank {manifest.rank})"
    paths = {number: path for path, number in table.per_rank.items()}
    chunks = {chunk.tensor: chunk for chunk in manifest.chunks}
    first = 0
    for number, own in enumerate(manifest.own):
        kinds = trees.kinds(own.tree, paths[number])
        for name, text in _texts(own.tree, kinds, paths[number]):
            found.texts[name + rank] = text
        leaves = [(name, kind) for name, kind in kinds.items() if kind in ("tensor", "numpy")]
        for at, (name, kind) in enumerate(leaves, start=first):
            chunk = chunks.get(len(table.tensors) + at)
            record = manifest.own_tensors[at]
            read = partial(_read_own, checkpoint, manifest, chunk, record)
            found.tensors[name + rank] = Stored(kind, record, read)
        first += own.tensors


def _read(checkpoint: Checkpoint, group: int, finder: Finder, key: str) -> torch.Tensor:
    table = checkpoint.table(group)
    record = table.tensors[table.index[key]]
    tensor = torch.empty(record.shape, dtype=record.dtype)
    if tensor.numel():
        with DataFiles(checkpoint) as data:
            reads = Reads(data)
            plan_box(table, finder, key, whole_box(record.shape), tensor, reads)
            reads.run()
    return tensor


def _read_own(
    checkpoint: Checkpoint, manifest: Manifest, chunk: Chunk | None, record: TensorRecord
) -> torch.Tensor:
    tensor = torch.empty(record.shape, dtype=record.dtype)
    if chunk is not None:  # an empty tensor has none
        into = bits(tensor)
        with DataFiles(checkpoint) as data:
            reads = Reads(data)
            reads.add(manifest, chunk, whole_box(tuple(into.shape)), into, into.dtype)
            reads.run()
    return tensor
