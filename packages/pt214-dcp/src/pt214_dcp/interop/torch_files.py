"""What ``torch.save`` wrote, read by torch's loader for weights once it is known to be harmless.

That loader runs no code of the file, but it trusts what the file says of sizes: it makes storages
and byte arrays as large as is asked, and calls ``UntypedStorage(n)``. So the archive and the pickle
in it are walked first.
"""

from __future__ import annotations

import zipfile
from pathlib import PurePosixPath
from typing import IO, Any

import torch

from pt214_dcp.errors import ChunkCorrupt
from pt214_dcp.interop.archives import check_archive, check_contents
from pt214_dcp.interop.pickles import Rules, check_pickle

RULES = Rules(
    frozenset(
        {
            "_codecs encode", "builtins bytearray", "builtins complex", "builtins set",
            "collections Counter", "collections OrderedDict", "torch Size", "torch device",
            "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
            "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
            "torch.serialization _get_layout",
        }
    )
)  # fmt: skip
_LEGACY_PICKLES = 5  # magic number, version, machine, the object, keys of storages


def check_torch_file(stream: IO[bytes], where: str, *, contents: bool) -> bool:
    """Whether it is an archive; older files of torch.save are pickles and storages in a row.

    Args:
        stream: what torch.save wrote and nothing else.
        where: the file and what it stands for, for messages.
        contents: whether to hold an archive's members against their crc32, which reads all.

    Raises:
        ChunkCorrupt: damaged, compressed, or it claims more than it holds.
        pickle.UnpicklingError: it holds what is not data.
    """
    length = stream.seek(0, 2)
    stream.seek(0)
    if stream.read(2) != b"PK":
        _check_legacy(stream, where, length)
        return False
    sizes = check_archive(stream, where)
    if contents:
        check_contents(stream, where)
    name = next((each for each in sizes if PurePosixPath(each).name == "data.pkl"), None)
    if name is None:
        raise ChunkCorrupt(f"{where}: an archive without data.pkl")
    with zipfile.ZipFile(stream) as archive, archive.open(name) as member:
        claimed = check_pickle(member, RULES, sizes[name])
    for key, size in claimed.items():
        entry = str(PurePosixPath(name).with_name("data") / key)
        if size > sizes.get(entry, 0):
            raise ChunkCorrupt(
                f"{where}: a storage of {size} bytes, entry {entry!r} has {sizes.get(entry, 0)}"
            )
    return True


def _check_legacy(stream: IO[bytes], where: str, length: int) -> None:
    stream.seek(0)
    claimed = 0
    for _ in range(_LEGACY_PICKLES):
        claimed += sum(check_pickle(stream, RULES, length).values())
        if claimed > length:
            raise ChunkCorrupt(f"{where}: storages of {claimed} bytes in a file of {length}")


def load_weights(source: Any, *, mmap: bool = False) -> Any:
    """What a file that was checked holds, on the CPU."""
    return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
