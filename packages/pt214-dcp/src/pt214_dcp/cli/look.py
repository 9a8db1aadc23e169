"""``ls``, ``info`` and ``cat``: what is in a checkpoint."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from pt214_dcp.checkpoint import Checkpoint, open_checkpoint
from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.cli.answer import Answer, Command, path_argument, size_of
from pt214_dcp.errors import BadOption
from pt214_dcp.layout import Box
from pt214_dcp.reader import read_tensor
from pt214_dcp.table import TensorRecord
from pt214_dcp.trees import values_of

_SHOWN = 1000  # elements that cat prints without being asked for a part


def _kind(record: TensorRecord) -> str:
    return str(record.dtype).removeprefix("torch.")


def ls(arguments: argparse.Namespace) -> Answer:
    """Tensors of a checkpoint, or steps of a folder."""
    path = arguments.path.absolute()
    checkpoints = Checkpointer(path)
    if steps := checkpoints.steps():
        sizes = {step: open_checkpoint(checkpoints.path(step)).commit.size_bytes for step in steps}
        facts = [{"step": step, "size_bytes": size} for step, size in sizes.items()]
        return Answer({"steps": facts}, [f"{step:>12}  {size_of(n)}" for step, n in sizes.items()])
    tensors = {
        key: {"dtype": _kind(record), "shape": list(record.shape)}
        for key, record in open_checkpoint(path).tensors.items()
    }
    lines = [f"{t['dtype']:>10}  {t['shape']!s:<20}  {key}" for key, t in tensors.items()]
    return Answer({"tensors": tensors}, lines)


def info(arguments: argparse.Namespace) -> Answer:
    """Facts of a checkpoint as a whole."""
    checkpoint = open_checkpoint(arguments.path.absolute())
    manifests = list(checkpoint.manifests())
    linked = {name for manifest in manifests for name in manifest.files}
    facts: dict[str, Any] = {
        "generation": checkpoint.commit.generation,
        "ranks": checkpoint.commit.world_size,
        "key_groups": len(checkpoint.commit.tables),
        "tensors": len(checkpoint.tensors),
        "chunks": sum(len(manifest.chunks) for manifest in manifests),
        "size_bytes": checkpoint.commit.size_bytes,
        "rank_size_bytes": [manifest.data_bytes for manifest in manifests],
        "linked_bytes": _linked_bytes(checkpoint, linked),
        "hashes": all(manifest.hashes for manifest in manifests if manifest.chunks),
        "values": values_of(checkpoint.tree),
    }
    lines = [f"{name}: {value}" for name, value in facts.items() if name != "values"]
    lines += [f"  {key} = {value}" for key, value in facts["values"].items()]
    return Answer(facts, lines)


def _linked_bytes(checkpoint: Checkpoint, names: set[str]) -> int:
    folder = checkpoint.folder
    return sum((folder / n).stat().st_size for n in names) if isinstance(folder, Path) else 0


def cat(arguments: argparse.Namespace) -> Answer:
    """One tensor, or one value."""
    checkpoint = open_checkpoint(arguments.path.absolute())
    values = values_of(checkpoint.tree)
    if arguments.key in values:
        value = values[arguments.key]
        return Answer({"key": arguments.key, "value": value}, [value])
    record = checkpoint.tensors.get(arguments.key)
    if record is None:
        near = [key for key in (*checkpoint.tensors, *values) if arguments.key in key][:5]
        hint = f"; perhaps {', '.join(near)}" if near else "; ls lists them"
        raise BadOption(f"key is {arguments.key!r}; the checkpoint has none of that name{hint}")
    box = _box(arguments.slice, record) if arguments.slice else None
    size = box.size if box else record.shape
    count = 1
    for n in size:
        count *= n
    if count > _SHOWN and not arguments.slice and not arguments.json:
        raise BadOption(f"{arguments.key} has {count} elements; choose with --slice 0:3,:")
    tensor = read_tensor(checkpoint, arguments.key, box)
    facts = {
        "key": arguments.key, "dtype": _kind(record), "shape": list(record.shape),
        "values": [str(v) for v in tensor.flatten().tolist()] if tensor.is_complex()
        else tensor.float().tolist() if tensor.dtype.itemsize == 1 and tensor.is_floating_point()
        else tensor.tolist(),
    }  # fmt: skip
    return Answer(facts, [f"{_kind(record)} {list(record.shape)}", str(tensor)])


def _box(text: str, record: TensorRecord) -> Box:
    """The part that ``0:3,:`` names."""
    parts = text.split(",")
    if len(parts) > len(record.shape):
        raise BadOption(f"--slice {text} has {len(parts)} dims; the tensor has {record.shape}")
    parts += [":"] * (len(record.shape) - len(parts))
    start, size = [], []
    for part, whole in zip(parts, record.shape, strict=True):
        match = re.fullmatch(r"(-?\d*)(:?)(-?\d*)", part.strip())
        if match is None or not part.strip():
            raise BadOption(f"--slice {text}: {part!r} is no index or range such as 3 or 0:3")
        low, colon, high = match.groups()
        chosen = slice(int(low) if low else None, int(high) if high else None)
        if not colon:
            chosen = slice(int(low), int(low) + 1 or None)
        begin, end, _ = chosen.indices(whole)
        if begin >= end:
            raise BadOption(f"--slice {text}: {part!r} holds nothing of {whole}")
        start.append(begin)
        size.append(end - begin)
    return Box(tuple(start), tuple(size))


def _add_cat(parser: argparse.ArgumentParser) -> None:
    path_argument(parser)
    parser.add_argument("key", help="path of the key, as ls prints it")
    parser.add_argument("--slice", help="a part, such as 0:3,: (use --slice=-1:,: for a minus)")


LS = Command("tensors of a checkpoint, or steps of a folder", path_argument, ls)
INFO = Command("facts of a checkpoint", path_argument, info)
CAT = Command("show one tensor or value", _add_cat, cat)
