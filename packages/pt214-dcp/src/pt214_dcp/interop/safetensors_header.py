"""Headers of safetensors files, checked before the library maps them.

    8 bytes: length of the header | the header, JSON | tensors, without holes

The library refuses a damaged header too, but says neither which file nor which key it was.

Source of the layout: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pt214_dcp.errors import ChunkCorrupt

MOST_HEADER_BYTES = 100_000_000  # as the library has it
METADATA = "__metadata__"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4,
}  # fmt: skip


def check_header(file: Path) -> tuple[str, ...]:
    """Names of the tensors of a file whose header tells the truth about its bytes.

    Raises:
        ChunkCorrupt: it does not; the message has the file, the key and the offset.
    """
    try:
        with open(file, "rb") as stream:
            length = os.fstat(stream.fileno()).st_size
            first = stream.read(8)
            size = int.from_bytes(first, "little")
            if len(first) < 8 or size > min(length - 8, MOST_HEADER_BYTES):
                raise ChunkCorrupt(
                    f"{file}: a header of {size} bytes at offset 8 of a file of {length}; at most "
                    f"{MOST_HEADER_BYTES} are allowed"
                )
            header = _parsed(stream.read(size), file)
    except OSError as error:
        raise ChunkCorrupt(f"{file}: {error.strerror}") from error
    begins = 8 + size
    spans = [(*_span(file, key, told), key) for key, told in header.items() if key != METADATA]
    _check_spans(file, spans, begins, length)
    return tuple(key for key in header if key != METADATA)


def _parsed(data: bytes, file: Path) -> dict[str, Any]:
    def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"key {key!r} is there twice")
            found[key] = value
        return found

    try:
        header = json.loads(data, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise ChunkCorrupt(f"{file}: the header at offset 8 is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ChunkCorrupt(f"{file}: the header at offset 8 is a {type(header).__name__}")
    return header


def _span(file: Path, key: str, told: Any) -> tuple[int, int]:
    """Where a tensor begins and ends, counted from the end of the header."""
    if not isinstance(told, dict) or not {"dtype", "shape", "data_offsets"} <= told.keys():
        raise ChunkCorrupt(f"{file}: {key}: the header has no dtype, shape and data_offsets")
    dtype, shape, offsets = told["dtype"], told["shape"], told["data_offsets"]
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ChunkCorrupt(
            f"{file}: {key}: dtype {dtype!r} is unknown; known are {', '.join(BITS)}"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ChunkCorrupt(f"{file}: {key}: shape {shape!r} at data_offsets {offsets!r}")
    needed = math.prod(shape) * bits
    if needed != (offsets[1] - offsets[0]) * 8:
        raise ChunkCorrupt(
            f"{file}: {key}: {needed // 8} bytes of {dtype} {shape} at data_offsets {offsets}"
        )
    return offsets[0], offsets[1]


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_spans(file: Path, spans: list[tuple[int, int, str]], begins: int, length: int) -> None:
    """One after the other, from the header's end to the file's."""
    at = 0
    for start, end, key in sorted(spans):
        if start != at:
            told = f"leaves a hole of {start - at}" if start > at else "overlaps the one before"
            raise ChunkCorrupt(f"{file}: {key} at offset {begins + start}: {told}")
        if begins + end > length:
            raise ChunkCorrupt(
                f"{file}: {key} at offset {begins + start} ends at {begins + end}, the file at "
                f"{length}"
            )
        at = end
    if begins + at != length:
        raise ChunkCorrupt(f"{file}: tensors end at offset {begins + at}, the file at {length}")
