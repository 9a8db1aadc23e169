"""Checkpoints of ``torch.distributed.checkpoint`` itself, read without trusting them.

    folder/.metadata        a pickle: what each file holds
    folder/__0_0.distcp     one ``torch.save`` after the other

``.metadata`` is unpickled with an exact list of the classes that stock writes into it: a name that
is not on the list ends the load before anything is called. Tensors are read by torch's own loader
for weights only.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pt214_dcp.errors import CheckpointError, ChunkCorrupt, NotACheckpoint, NotData
from pt214_dcp.interop.pickles import Rules, check_pickle
from pt214_dcp.interop.torch_files import check_torch_file, load_weights

METADATA = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata"
# Exactly what stock writes; prefixes would let in whatever a module happens to hold.
_ALLOWED = {
    *(
        (_METADATA, name)
        for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "_local.PosixPath"),
}  # fmt: skip
_RULES = Rules(frozenset({"builtins getattr", *(" ".join(each) for each in _ALLOWED)}))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


def _memory_format(owner: Any, name: str) -> Any:
    """What ``getattr`` may be asked for: Python 3.11.3 and earlier pickle members of an Enum so."""
    from torch.distributed.checkpoint import metadata

    formats = metadata._MEM_FORMAT_ENCODING
    if owner is formats and name in formats.__members__:
        return formats[name]
    raise pickle.UnpicklingError(f"getattr of {name!r} does not belong in a checkpoint")


def is_stock(path: Path) -> bool:
    """Whether ``path`` holds a checkpoint of stock torch."""
    return (path / METADATA).is_file()


def read_distcp(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The nested state dict of a stock checkpoint, whole, on the CPU.

    Raises:
        NotACheckpoint: there is no ``.metadata``.
        ChunkCorrupt: it is damaged, or holds what does not belong there.
        NotData: a value that only a full unpickler could read; the message has its key.
    """
    folder = Path(path).absolute()
    metadata = _read_metadata(folder)
    found: dict[str, Any] = {}
    paths = metadata.planner_data or {}
    for name, kind in metadata.state_dict_metadata.items():
        where = tuple(paths.get(name, (name,)))
        if any(isinstance(key, int) and key >= len(paths) for key in where):
            raise ChunkCorrupt(f"{folder / METADATA}: {name}: a list with more places than values")
        try:
            if type(kind).__name__ == "BytesStorageMetadata":
                value = _read_item(folder, metadata, name, None)
            else:
                value = _read_tensor(folder, metadata, name, kind)
            _put(found, where, value)
        except CheckpointError:
            raise
        except (AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
            raise ChunkCorrupt(f"{folder / METADATA}: {name}: {error}") from error
    return found


def _read_metadata(folder: Path) -> Any:
    try:
        data = (folder / METADATA).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotACheckpoint(f"{folder}: no {METADATA}, so no stock checkpoint") from error
    try:
        check_pickle(io.BytesIO(data), _RULES, len(data))
        metadata = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # an unpickler may raise anything on damaged bytes
        raise ChunkCorrupt(f"{folder / METADATA}: {error}") from error
    if type(metadata).__name__ != "Metadata" or not isinstance(metadata.storage_data, dict):
        raise ChunkCorrupt(f"{folder / METADATA}: holds no Metadata")
    try:
        _check_places(folder, metadata)
    except (AttributeError, TypeError) as error:
        raise ChunkCorrupt(f"{folder / METADATA}: {error}") from error
    return metadata


def _check_places(folder: Path, metadata: Any) -> None:
    """Each part has bytes of its own in a file of the folder: else few bytes could fill memory."""
    places = [(str(each.relative_path), each) for each in metadata.storage_data.values()]
    before, end = "", 0
    for file, info in sorted(places, key=lambda each: (each[0], each[1].offset)):
        if Path(file).name != file or info.transform_descriptors:
            raise ChunkCorrupt(f"{folder}: file {file!r} is outside, or transformed")
        if file != before:
            before, end = file, 0
        if info.offset < end or info.length < 0:
            raise ChunkCorrupt(f"{folder / file}: two parts share bytes at offset {info.offset}")
        end = info.offset + info.length


def _read_tensor(folder: Path, metadata: Any, name: str, kind: Any) -> torch.Tensor:
    dtype, stored = kind.properties.dtype, 0
    for chunk in kind.chunks:
        stored += _info(folder, metadata, name, chunk.offsets).length
    if kind.size.numel() * dtype.itemsize > stored:
        told = f"{kind.size.numel() * dtype.itemsize} bytes, its parts have {stored}"
        raise ChunkCorrupt(f"{folder / METADATA}: {name}: {told}")
    tensor = torch.empty(kind.size, dtype=dtype)
    covered = 0
    for chunk in kind.chunks:
        part = _read_item(folder, metadata, name, chunk.offsets)
        place = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
        if not isinstance(part, torch.Tensor) or part.shape != tensor[place].shape:
            raise ChunkCorrupt(f"{folder}: {name}: the chunk at {chunk.offsets} has another shape")
        tensor[place] = part
        covered += part.numel()
    if covered != tensor.numel():
        raise ChunkCorrupt(f"{folder}: {name}: chunks hold {covered} of {tensor.numel()} elements")
    return tensor


def _info(folder: Path, metadata: Any, name: str, offset: Any) -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    info = metadata.storage_data.get(MetadataIndex(name, offset))
    if info is None:
        raise ChunkCorrupt(f"{folder}: {name}: no file holds the part at {offset}")
    return info


def _read_item(folder: Path, metadata: Any, name: str, offset: Any) -> Any:
    info = _info(folder, metadata, name, offset)
    file = str(info.relative_path)
    try:
        with open(folder / file, "rb") as stream:
            if info.offset + info.length > os.fstat(stream.fileno()).st_size:
                raise ChunkCorrupt(
                    f"{folder / file}: {name}: cut before {info.offset + info.length}"
                )
            stream.seek(info.offset)
            data = stream.read(info.length)
    except OSError as error:
        raise ChunkCorrupt(f"{folder / file}: {error.strerror}") from error
    where = f"{folder / file} at offset {info.offset}: {name}"
    try:
        check_torch_file(io.BytesIO(data), where, contents=True)
        return load_weights(io.BytesIO(data))
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise NotData(
            f"{name}: a value that torch reads with a full unpickler only, which runs code of the "
            f"file; save it as numbers and texts ({error})"
        ) from error
    except Exception as error:  # damaged zip files raise many kinds
        raise ChunkCorrupt(f"{where}: {error}") from error


def _put(found: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set ``value`` at a path of dict keys and places of lists."""
    at = found
    for key, after in pairwise(path):
        empty: Callable[[], Any] = dict if isinstance(after, str) else list
        if isinstance(at, list):
            at.extend([None] * (key + 1 - len(at)))  # type: ignore[operator]
            at[key] = empty() if at[key] is None else at[key]  # type: ignore[index]
        elif key not in at:
            at[key] = empty()
        at = at[key]
    if isinstance(at, list):
        at.extend([None] * (path[-1] + 1 - len(at)))  # type: ignore[operator]
    at[path[-1]] = value
