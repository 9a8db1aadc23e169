"""What one rank's data file will look like: parts, blocks, header. Made once, used at each save.

    header | part | part | ...        parts of wide elements first, so each begins at a multiple of
                                      its element size with no hole before it

The header makes the file one that readers of safetensors take: each part is an entry of it, named
by its key, and by its place in the tensor where it is not all of it.

Source of the header: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch

from pt214_dcp.layout import Held
from pt214_dcp.manifest import ChunkColumns, block_sizes
from pt214_dcp.table import TensorRecord

_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.uint16: "U16", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32",
    torch.uint32: "U32", torch.float32: "F32", torch.float64: "F64", torch.int64: "I64",
    torch.uint64: "U64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGN_BYTES = 8  # of the header, as the format's own writer has it


class Part(NamedTuple):
    """A part of a tensor and where its bytes lie, counted from the end of the header."""

    tensor: int
    held: Held
    at: int
    size_bytes: int


class Window(NamedTuple):
    """Blocks that follow one another and are copied, handed over and written as one."""

    first: int
    last: int
    at: int
    size_bytes: int


@dataclass(frozen=True)
class FilePlan:
    """One rank's data file.

    Attributes:
        parts: in the file's order.
        sizes: bytes of each block.
        size_bytes: of all parts.
        header: the first bytes of the file.
        columns: the parts as the manifest holds them.
    """

    parts: tuple[Part, ...]
    sizes: array[int]
    size_bytes: int
    header: bytes
    columns: ChunkColumns

    def windows(self, most_bytes: int) -> Iterator[Window]:
        """Cut the blocks in windows of at most ``most_bytes``."""
        first, at, size_bytes = 0, 0, 0
        for number, size in enumerate(self.sizes):
            if size_bytes and size_bytes + size > most_bytes:
                yield Window(first, number, at, size_bytes)
                first, at, size_bytes = number, at + size_bytes, 0
            size_bytes += size
        if size_bytes:
            yield Window(first, len(self.sizes), at, size_bytes)


def file_plan(
    keys: Sequence[str], tensors: Sequence[TensorRecord], parts: Sequence[tuple[int, Held]]
) -> FilePlan:
    """Lay out ``parts``, which are (index of the tensor, part of it)."""
    ordered = sorted(parts, key=lambda part: -tensors[part[0]].dtype.itemsize)
    placed, at = [], 0
    for tensor, held in ordered:
        size_bytes = held.box.numel * tensors[tensor].dtype.itemsize
        placed.append(Part(tensor, held, at, size_bytes))
        at += size_bytes
    return FilePlan(
        tuple(placed),
        block_sizes(part.size_bytes for part in placed),
        at,
        _header(keys, tensors, placed),
        ChunkColumns.of([(part.tensor, part.held.box) for part in placed]),
    )


def _header(keys: Sequence[str], tensors: Sequence[TensorRecord], parts: Sequence[Part]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for part in parts:
        record, shape = tensors[part.tensor], list(part.held.box.size)
        dtype = _NAMES.get(record.dtype)
        if dtype is None:  # what the format has no name for goes as bytes
            dtype, shape = "U8", [*shape, record.dtype.itemsize]
        name = keys[part.tensor] or f"~span/{part.tensor}"
        if part.held.box.size != record.shape:
            box = part.held.box
            name += "[" + ",".join(
                f"{a}:{a + n}" for a, n in zip(box.start, box.size, strict=True)
            ) + "]"  # fmt: skip
        while name in entries:
            name += "~"
        offsets = [part.at, part.at + part.size_bytes]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text
