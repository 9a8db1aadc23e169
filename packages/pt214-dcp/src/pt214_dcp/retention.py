"""Which steps to keep, and how to remove one so that a kill midway leaves no damaged checkpoint.

    root record removed -> folder fsynced -> the rest removed

What a kill leaves after the first step is what a killed saver leaves: generations that no record
names, for ``repair``. Other checkpoints lose nothing: what they share with this one are hard links.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from pt214_dcp import files
from pt214_dcp.errors import NotACheckpoint
from pt214_dcp.root import COMMIT
from pt214_dcp.stores.place import Place, Where, remove


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
    shutil.rmtree(path)
