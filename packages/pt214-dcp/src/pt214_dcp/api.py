"""save, async_save, load, and the two names of the article.

>>> import torch, tempfile, pt214_dcp
>>> state = {"epoch": 3, "model": {"w": torch.ones(2)}}
>>> with tempfile.TemporaryDirectory() as folder:
...     pt214_dcp.save(state, folder)
...     blank = {"epoch": 0, "model": {"w": torch.zeros(2)}}
...     pt214_dcp.load(blank, folder)
>>> blank
{'epoch': 3, 'model': {'w': tensor([1., 1.])}}
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt214_dcp import reader, state
from pt214_dcp.agree import Belief, Ranks, agree, members
from pt214_dcp.errors import CheckpointError, LoadFailed, SaveFailed
from pt214_dcp.handle import SaveHandle
from pt214_dcp.saver import start

if TYPE_CHECKING:
    import torch.distributed as dist

State = dict[Any, Any]
PathLike = str | os.PathLike[str]
TIMEOUT_S = 600.0  # for ranks that never report; as torch's own collectives on the CPU, rounded

_latest: SaveHandle | None = None  # of save_state_dict: the next call waits for it


def save(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    alone: bool = False,
) -> SaveHandle:
    """Save and wait until the checkpoint is durable. Arguments and errors: see ``async_save``.

    Returns:
        The ended handle, for its facts.
    """
    handle = async_save(
        state_dict, path, process_group=process_group, timeout_s=timeout_s, alone=alone
    )
    handle.wait()
    return handle


def async_save(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    alone: bool = False,
) -> SaveHandle:
    """Copy the state, agree with the other ranks, and write it behind the training's back.

    Collective: every rank of the group calls it. Tensors may change as soon as it returns. What
    lies at ``path`` stays until the new checkpoint is whole, then it is removed.

    Args:
        state_dict: nested dict, list and tuple of tensors, DTensors, None, bool, int, float,
            complex, str and bytes. Plain tensors and values must be equal on all ranks.
        path: folder of the checkpoint, on storage that all ranks share.
        process_group: who saves; None is the default group, or this process where there is none.
        timeout_s: seconds that the background waits for other ranks before it gives up.
        alone: this process saves by itself, whatever groups exist.

    Raises:
        NotData: a value is not data; the message has its key's path.
        BadPath: ``path`` can't be a folder.
        RanksDiffer: ranks hold unequal state; the message names ranks and keys.
        SaveFailed: a rank failed or was lost.
    """
    ranks = members(process_group, alone=alone)
    return start(state_dict, _path(path), ranks, _timeout(timeout_s))


def save_state_dict(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
) -> SaveHandle:
    """``async_save`` for a loop that keeps no handle.

    The next call waits for this save and raises its error, on all ranks; the program's exit waits
    for it, too.
    """
    global _latest
    previous, _latest = _latest, None
    earlier = None if previous is None else earlier_error(previous)
    ranks = members(process_group)
    _latest = start(state_dict, _path(path), ranks, _timeout(timeout_s), earlier)
    return _latest


def earlier_error(handle: SaveHandle) -> BaseException | None:
    """Wait for an earlier save; its error, unless it was cancelled or already told."""
    told = handle.told
    error = handle.exception()
    return None if told or handle.cancelled else error


def load(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    alone: bool = False,
) -> None:
    """Fill ``state_dict`` in place from the checkpoint at ``path``, on any number of ranks.

    Collective, as ``async_save`` is: all ranks load the same generation, or all raise. Tensors keep
    their memory, device and placements; numbers and texts are replaced in their containers.

    Args:
        state_dict: the same keys, shapes and dtypes as were saved.
        path: folder of the checkpoint.
        process_group: who loads; None is the default group, or this process where there is none.
        alone: this process loads by itself, whatever groups exist.

    Raises:
        NotACheckpoint: nothing is committed at ``path``.
        StateMismatch: all that is missing, unexpected or different; nothing was written.
        ChunkCorrupt: stored bytes are wrong; ``state_dict`` is then partly overwritten.
        LoadFailed: another rank failed, or ranks met different generations.
    """
    ranks, folder = members(process_group, alone=alone), _path(path)
    checkpoint: reader.Checkpoint | None = None
    leaves: list[state.Leaf] = []
    failure: BaseException | None = None
    try:
        checkpoint = reader.open_checkpoint(folder)
        tree, leaves = state.flatten(state_dict)
        reader.check_fit(checkpoint, tree, leaves)
    except Exception as error:
        failure = error
    _together(ranks, folder, checkpoint, failure)
    assert checkpoint is not None
    try:
        reader.fill(checkpoint, leaves, ranks.rank, ranks.global_ranks)
    except Exception as error:
        error.add_note("the state dict is partly overwritten: load another checkpoint into it")
        failure = error
    _together(ranks, folder, checkpoint, failure)
    state.replace_scalars(state_dict, checkpoint.tree)


def load_state_dict(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Wait for the save that ``save_state_dict`` began, then ``load``."""
    global _latest
    previous, _latest = _latest, None
    if previous is not None:
        previous.wait()
    load(state_dict, path, process_group=process_group)


def _together(
    ranks: Ranks,
    path: Path,
    checkpoint: reader.Checkpoint | None,
    failure: BaseException | None,
) -> None:
    """All ranks go on with the same generation, or all raise."""
    name = checkpoint.commit.generation if checkpoint else ""
    belief = Belief(bytes.fromhex(name[4:]), b"", lambda: {str(path): name}) if name else None
    try:
        agree(ranks, belief, failure)
    except SaveFailed as error:
        raise LoadFailed(f"{path}: not loaded: {error}") from error


def _path(path: PathLike) -> Path:
    text = os.fspath(path)
    if not isinstance(text, str) or not text:
        raise CheckpointError(f"path is {path!r}; the name of a folder is needed")
    return Path(text).absolute()


def _timeout(timeout_s: float) -> float:
    if not timeout_s > 0:
        raise ValueError(f"timeout_s is {timeout_s!r}; it must be above 0 seconds")
    return timeout_s
