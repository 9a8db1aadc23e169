"""Folders as the Hugging Face hub holds them: ``model.safetensors``, in several files if large.

Tensors are read and written one file at a time, so memory holds one file's worth.

Source of the layout: https://huggingface.co/docs/safetensors/index
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from pt214_dcp.checkpoint import Checkpoint
from pt214_dcp.errors import CheckpointError, ChunkCorrupt, NotACheckpoint, NotData
from pt214_dcp.interop.safetensors_header import check_header
from pt214_dcp.progress import Told
from pt214_dcp.reader import read_tensor
from pt214_dcp.table import Table
from pt214_dcp.trees import children, values_of

INDEX = "model.safetensors.index.json"
MOST_BYTES = 5_000_000_000  # of one file, as transformers has it


def is_safetensors(path: Path) -> bool:
    """Whether ``path`` is such a file or folder."""
    return path.suffix == ".safetensors" or any(path.glob("*.safetensors"))


def _library() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise CheckpointError(
            'safetensors is not installed: pip install "pt214-dcp[huggingface]"'
        ) from error
    return safetensors.torch


def write_folder(
    checkpoint: Checkpoint, folder: Path, *, most_bytes: int = MOST_BYTES, told: Told | None = None
) -> None:
    """Write the tensors of a checkpoint; its values, which the format can't hold, must be none.

    Names are the dotted paths of the keys. If all tensors lie in one dict under one key, such as
    ``{"model": {...}}``, that key is left out.

    Raises:
        NotData: values other than tensors; the message has their keys.
    """
    library = _library()
    table = checkpoint.table(0)
    names = names_of(table)
    values = values_of(table.tree)
    if values:
        some = ", ".join(list(values)[:5])
        raise NotData(f"{checkpoint.path}: safetensors holds tensors only; values: {some}")
    folder.mkdir(parents=True, exist_ok=True)
    files = _files(table, names, most_bytes)
    place: dict[str, str] = {}
    done, total = 0, sum(map(_size(table), names.values()))
    for number, file in enumerate(files, start=1):
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {each: read_tensor(checkpoint, key) for each, key in file.items()}
        library.save_file(tensors, folder / name, metadata={"format": "pt"})
        place |= dict.fromkeys(file, name)
        done += sum(map(_size(table), file.values()))
        if told is not None:
            told(done, total)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": place}
        (folder / INDEX).write_text(json.dumps(index, indent=2))


def write_tensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write tensors that are in memory anyway to one file."""
    library = _library()
    folder.mkdir(parents=True, exist_ok=True)
    library.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def names_of(table: Table) -> dict[str, str]:
    """Name in the folder -> key in the checkpoint."""
    tree = table.tree
    below = list(children(tree))
    prefix = ""
    if len(below) == 1 and isinstance(below[0][1], dict) and "dict" in below[0][1]:
        prefix = f"{below[0][0]}/"
    found: dict[str, str] = {}
    for key in table.keys:
        if key:
            parts = key.removeprefix(prefix).split("/")
            words = [part[1:-1] if part.startswith("[") else part for part in parts]
            name = ".".join(words).replace("~1", "/").replace("~2", "[").replace("~0", "~")
            if name in found:
                raise CheckpointError(f"keys {found[name]} and {key} would both be {name!r}")
            found[name] = key
    return found


def _size(table: Table) -> Callable[[str], int]:
    def size(key: str) -> int:
        record = table.tensors[table.index[key]]
        return torch.Size(record.shape).numel() * record.dtype.itemsize

    return size


def _files(table: Table, names: Mapping[str, str], most_bytes: int) -> list[dict[str, str]]:
    files: list[dict[str, str]] = [{}]
    room = most_bytes
    for name, key in names.items():
        size = _size(table)(key)
        if size > room and files[-1]:
            files.append({})
            room = most_bytes
        files[-1][name] = key
        room -= size
    return files


def read_files(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry of a safetensors file or folder.

    Where a folder has ``model.safetensors.index.json``, what that lists is read and nothing else.

    Raises:
        NotACheckpoint: there is none.
        ChunkCorrupt: a file or the index is damaged; the message has file, key and offset.
    """
    library = _library()
    listed = _listed(path / INDEX) if (path / INDEX).is_file() else None
    if listed is not None:
        files = sorted({path / file for file in listed.values()})
    else:
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise NotACheckpoint(f"{path}: no .safetensors file")
    held = {file: check_header(file) for file in files}  # all of them, before the first is read
    wanted = listed if listed is not None else _all_of(held)
    for file in files:
        for name in [name for name, place in wanted.items() if place == file.name]:
            if name not in held[file]:
                raise ChunkCorrupt(f"{file}: {name}: {INDEX} lists it here, and it is not")
    for file in files:
        try:
            tensors = library.load_file(file)
        except Exception as error:  # the library's own kind, for what its version can't read
            raise ChunkCorrupt(f"{file}: {error}") from error
        yield from ((name, each) for name, each in tensors.items() if wanted.get(name) == file.name)


def _listed(index: Path) -> dict[str, str]:
    """Name of each tensor -> name of its file, as the index has them."""
    try:
        found = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ChunkCorrupt(f"{index}: no weight_map: {error}") from error
    if not isinstance(found, dict):
        raise ChunkCorrupt(f"{index}: weight_map is a {type(found).__name__}")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ChunkCorrupt(f"{index}: {name}: file {file!r} is outside the folder")
        if not (index.parent / file).is_file():
            raise ChunkCorrupt(f"{index}: {name}: file {file!r} is not in the folder")
    return found


def _all_of(held: Mapping[Path, tuple[str, ...]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file, names in held.items():
        for name in names:
            if name in found:
                raise ChunkCorrupt(
                    f"{file}: {name} is in {found[name]} too, and no {INDEX} chooses"
                )
            found[name] = file.name
    return found
