"""A file or folder of another format that appears whole or not at all.

    .name.<uuid>.part  ->  fsync of all in it  ->  rename to name  ->  fsync of the folder above

A kill leaves the first name, which no reader takes for the second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from pt214_dcp import files
from pt214_dcp.errors import BadPath


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Where to write what shall lie at ``path`` once the block has ended well.

    Args:
        path: nothing may lie there but an empty folder.

    Raises:
        BadPath: something lies there.
    """
    check_free(path)
    files.make_folder(path.parent)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        for each in [part, *part.rglob("*")]:
            _sync(each)
        os.replace(part, path)
        files.sync_folder(path.parent)
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        part.unlink(missing_ok=True)


def check_free(path: Path) -> None:
    """Refuse a path where something lies.

    Raises:
        BadPath: a file, or a folder that is not empty.
    """
    if path.is_file() or path.is_symlink() or (path.is_dir() and any(path.iterdir())):
        raise BadPath(f"{path}: something lies here; choose another path")


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
