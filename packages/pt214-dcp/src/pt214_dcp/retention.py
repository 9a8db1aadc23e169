"""Which steps to keep, and how to remove one so that a kill midway leaves no damaged checkpoint.

    root record removed -> folder fsynced -> generations taken away -> the rest removed

What a kill leaves after the first step is what a killed saver leaves: generations that no record
names, for ``repair``. Other checkpoints lose nothing: what they share with this one are hard links.
A save to the same path meanwhile fails as a whole, or its checkpoint stays as a whole.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Sequence

from pt214_dcp import files, leftovers
from pt214_dcp.errors import NotACheckpoint
from pt214_dcp.root import COMMIT
from pt214_dcp.stores.place import Place, Where, remove

logger = logging.getLogger(__name__)


def kept_steps(folder: Where, steps: Sequence[int], keep: int, every: int | None) -> set[int]:
    """The newest ``keep`` of ``steps``, and those that ``every`` divides.

    Args:
        folder: for the message.
        steps: that are committed there, rising.
        keep: 1 or more.
        every: 1 or more, or None.

    Raises:
        NotACheckpoint: there are no steps, so the folder is hardly the one that was meant.

    >>> from pathlib import Path
    >>> sorted(kept_steps(Path("runs"), range(6), 2, 3))
    [0, 3, 4, 5]
    """
    if not steps:
        raise NotACheckpoint(f"{folder}: no committed steps in this folder")
    return set(steps[-keep:]) | {step for step in steps if every and step % every == 0}


def remove_checkpoint(path: Where) -> None:
    """Remove the folder ``path`` and the checkpoint in it.

    Raises:
        OSError: what the disk answers; what is still there may be removed by a second call.
    """
    if isinstance(path, Place):
        remove(path)
        return
    (path / COMMIT).unlink(missing_ok=True)
    files.sync_folder(path)  # else a power cut may bring the record back, but not its data
    leftovers.finish_taken(path)
    for generation in leftovers.unnamed(path):
        leftovers.take_away(generation)
    if (path / COMMIT).exists() or leftovers.unnamed(path):
        logger.info("%s stays: a save to it began or was committed meanwhile", path)
        return
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if not leftovers.is_ours(entry):
                shutil.rmtree(entry)
        elif entry.name != COMMIT:
            entry.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.rmdir()
