"""From one format to another: ours, stock torch.distributed.checkpoint, safetensors, torch.save.

What a source is, is seen from what lies there. What the target can't hold is refused by its key.
"""

from __future__ import annotations

import enum
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from pt214_dcp.api import save
from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.errors import BadOption, CheckpointError, NotACheckpoint, NotData
from pt214_dcp.interop.distcp import is_stock, read_distcp
from pt214_dcp.interop.huggingface import (
    is_safetensors,
    read_files,
    write_folder,
    write_tensors,
)
from pt214_dcp.interop.target import appearing, check_free
from pt214_dcp.interop.torch_files import check_torch_file, load_weights
from pt214_dcp.progress import Told
from pt214_dcp.reader import build
from pt214_dcp.root import COMMIT


class Kind(enum.Enum):
    """Formats."""

    PT214 = "pt214"
    STOCK = "stock"
    SAFETENSORS = "safetensors"
    TORCH = "torch"


def kind_of(path: Path) -> Kind:
    """What lies at ``path``.

    Raises:
        NotACheckpoint: nothing that is known.
    """
    if (path / COMMIT).is_file():
        return Kind.PT214
    if is_stock(path):
        return Kind.STOCK
    if is_safetensors(path):
        return Kind.SAFETENSORS
    if path.is_file():
        return Kind.TORCH
    raise NotACheckpoint(
        f"{path}: neither {COMMIT} nor .metadata nor .safetensors lies here, and it is no file"
    )


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | Kind = Kind.PT214,
    progress: Told | None = None,
) -> None:
    """Read ``source``, whatever it is, and write ``target``.

    The target appears whole or not at all. Memory holds the whole state, but for these: files of
    safetensors and of torch.save are mapped, not read; pt214 to safetensors goes file by file.

    Args:
        source: a checkpoint of ours, a stock one, a safetensors file or folder, a torch.save file.
        target: where to write; nothing may lie there, unless it is a checkpoint of ours, which is
            replaced at the very end.
        to: "pt214", "stock", "safetensors" or "torch".
        progress: called with bytes done and bytes in all.

    Raises:
        BadOption: ``to`` is none of these.
        NotACheckpoint: ``source`` is nothing that is known.
        NotData: the target can't hold a value; the message has its key.
        LoadFailed: ``source`` has several key groups or ``PerRank`` values.
        BadPath: something lies at ``target``.
        ChunkCorrupt: ``source`` is damaged, compressed, or lies about its sizes.
    """
    try:
        kind = Kind(to)
    except ValueError:
        allowed = ", ".join(repr(each.value) for each in Kind)
        raise BadOption(f"to is {to!r}; it must be one of {allowed}") from None
    before, after = Path(source).absolute(), Path(target).absolute()
    found = kind_of(before)
    if kind is Kind.PT214:
        save(_read(before, found), after, alone=True, progress=progress or False)
        return
    check_free(after)  # now: not after minutes of reading
    with appearing(after) as part:
        if (found, kind) == (Kind.PT214, Kind.SAFETENSORS):
            write_folder(open_checkpoint(before), part, told=progress)
        else:
            _write(_read(before, found), part, kind)


def _read(path: Path, kind: Kind) -> Any:
    if kind is Kind.PT214:
        return build(open_checkpoint(path))
    if kind is Kind.STOCK:
        return read_distcp(path)
    if kind is Kind.SAFETENSORS:
        return dict(read_files(path))
    return _read_torch(path)


def _read_torch(path: Path) -> Any:
    try:
        with open(path, "rb") as stream:
            packed = check_torch_file(stream, str(path), contents=False)
        return load_weights(path, mmap=packed)  # older files can't be mapped
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds for what is no file of its own
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NotACheckpoint(
            f"{path}: torch.load(weights_only=True) can't read it: {told}"
        ) from error


def _write(state: Any, path: Path, kind: Kind) -> None:
    if kind is Kind.TORCH:
        torch.save(state, path)
    elif kind is Kind.STOCK:
        from torch.distributed.checkpoint.state_dict_saver import save as stock_save

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process, as is meant
            stock_save(state, checkpoint_id=path, no_dist=True)
    else:
        write_tensors(dict(_flat(state)), path)


def _flat(state: Any, name: str = "") -> Any:
    """Name and tensor of each leaf of nested dicts and lists."""
    pairs = state.items() if isinstance(state, dict) else enumerate(state)
    for key, value in pairs:
        below = f"{name}.{key}" if name else str(key)
        if isinstance(value, torch.Tensor):
            yield below, value.contiguous().clone()
        elif isinstance(value, dict | list):
            yield from _flat(value, below)
        else:
            raise NotData(f"{below}: a {type(value).__name__}; safetensors holds tensors only")
