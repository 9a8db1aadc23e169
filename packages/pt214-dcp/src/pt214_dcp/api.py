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

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pt214_dcp.exchange import TIMEOUT_S, members
from pt214_dcp.handle import SaveHandle
from pt214_dcp.loader import LoadOptions, LoadReport, load_into
from pt214_dcp.options import save_options
from pt214_dcp.progress import Progress, meter, meter_of
from pt214_dcp.saver import start
from pt214_dcp.stores.resolve import PathLike, where
from pt214_dcp.warm import warm

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

State = dict[Any, Any]

_latest: SaveHandle | None = None  # of save_state_dict: the next call waits for it


def save(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    alone: bool = False,
    overwrite: bool = True,
    base: PathLike | None = None,
    hashes: bool = False,
    key_group: str | None = None,
    staging_bytes: int | None = None,
    progress: Progress = False,
) -> SaveHandle:
    """Save and wait until the checkpoint is durable. Arguments and errors: see ``async_save``.

    Tensors on the CPU are written from where they lie, without a copy.

    Returns:
        The ended handle, for its facts.
    """
    ranks = members(process_group, alone=alone, timeout_s=timeout_s)
    options = save_options(
        timeout_s=timeout_s, overwrite=overwrite, base=None if base is None else where(base),
        hashes=hashes, key_group=key_group, staging_bytes=staging_bytes,
        progress=meter_of(progress, f"save {path}", rank=ranks.rank),
    )  # fmt: skip
    handle = start(state_dict, where(path), ranks, options, blocking=True)
    handle.wait()
    return handle


def async_save(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    alone: bool = False,
    overwrite: bool = True,
    base: PathLike | None = None,
    hashes: bool = False,
    key_group: str | None = None,
    staging_bytes: int | None = None,
    overlap: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    progress: Progress = False,
) -> SaveHandle:
    """Copy the state, agree with the other ranks, and write it behind the training's back.

    Collective: every rank of the group calls it. Tensors may change as soon as it returns, but see
    ``overlap``. What lies at ``path`` stays until the new checkpoint is whole, then it is removed.

    Args:
        state_dict: nested dict, list and tuple of tensors, DTensors, numpy arrays, None, bool,
            int, float, complex, str and bytes. Plain tensors and values must be equal on all ranks
            of a key group, or stand in ``PerRank``. Tensors that share memory are written once.
        path: folder of the checkpoint, on storage that all ranks share; or a URL, such as
            ``s3://bucket/prefix/step-100``; or a ``stores.Place``.
        process_group: who saves; None is the default group, or this process where there is none.
        timeout_s: seconds to wait for other ranks: for each to call this, and, in the background,
            for each to have written.
        alone: this process saves by itself, whatever groups exist.
        overwrite: replace what lies at ``path``, at the very end and at once; False refuses.
        base: an earlier checkpoint saved with ``hashes`` or ``base``: blocks that it holds are
            linked, not written. It may be ``path`` itself, or removed later.
        hashes: keep a hash of each block, so that this checkpoint can be a ``base``.
        key_group: a name that ranks with equal keys share, such as their pipeline stage. By default
            ranks whose DTensors lie over the same meshes are one group.
        staging_bytes: most memory for copies, in this process and its writer together; if the state
            is larger, the call waits for the disk. None is half of the free memory.
        overlap: optimizers whose parameters and state are copied after the call returns, while
            forward and backward run; their next ``step`` waits for the copy.
        progress: True shows a meter, on rank 0; or a function that is called in the background with
            bytes written and bytes in all, of this rank. What it raises is logged, no more.

    The error of an earlier save in the background that nobody has asked about is raised by the
    next save, to whatever path: then nothing new is begun.

    Raises:
        NotData: a value is not data; the message has its key's path.
        BadPath: ``path`` can't be a folder, or no store can be opened under that URL.
        AlreadyThere: ``overwrite`` is False, and a checkpoint lies there.
        BadOption: an argument has a value that it can't have.
        RanksDiffer: ranks hold unequal state; the message names ranks and keys.
        RankLost: a rank did not come within ``timeout_s``, or is lost; the message names it.
        SaveFailed: a rank failed.
        CommitConflict: (from ``wait``) in an object store, another saver committed to ``path``
            since this save began.
    """
    ranks = members(process_group, alone=alone, timeout_s=timeout_s)
    options = save_options(
        timeout_s=timeout_s, overwrite=overwrite, base=None if base is None else where(base),
        hashes=hashes, key_group=key_group, staging_bytes=staging_bytes, overlap=overlap,
        progress=meter_of(progress, f"save {path}", rank=ranks.rank),
    )  # fmt: skip
    return start(state_dict, where(path), ranks, options)


def save_state_dict(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    progress: Progress = False,
) -> SaveHandle:
    """``async_save`` for a loop that keeps no handle.

    The next call waits for this save and raises its error, on all ranks; the program's exit waits
    for it, too.
    """
    global _latest
    previous, _latest = _latest, None
    earlier = None if previous is None else earlier_error(previous)
    ranks = members(process_group, timeout_s=timeout_s)
    told = meter_of(progress, f"save {path}", rank=ranks.rank)
    options = save_options(timeout_s=timeout_s, progress=told)
    _latest = start(state_dict, where(path), ranks, options, earlier=earlier)
    return _latest


def earlier_error(handle: SaveHandle) -> BaseException | None:
    """Wait for an earlier save; its error, unless it was cancelled or already told."""
    told = handle.told
    error = handle.exception()
    return None if told or handle.cancelled else error


def prepare(
    state_dict: State,
    *,
    process_group: dist.ProcessGroup | None = None,
    staging_bytes: int | None = None,
) -> None:
    """Do before training what the first ``async_save`` would have to: memory, plan, writer process.

    The first touch of memory costs ten times a copy into it, so without this the first save blocks
    training longer than all later ones. Not collective.

    Args:
        state_dict: as it will be saved; only kinds, shapes and layouts are looked at.
        process_group: who will save.
        staging_bytes: as it will be given to ``async_save``.
    """
    warm(state_dict, members(process_group), save_options(staging_bytes=staging_bytes))


def load(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    alone: bool = False,
    cast: bool = False,
    partial: bool = False,
    progress: Progress = False,
) -> LoadReport:
    """Fill ``state_dict`` in place from the checkpoint at ``path``, on any number of ranks.

    Collective, as ``async_save`` is: all ranks load the same generation, or all raise. Tensors keep
    their memory, device and placements; numbers and texts are replaced in their containers.

    Args:
        state_dict: the same keys, shapes and dtypes as were saved.
        path: folder of the checkpoint.
        process_group: who loads; None is the default group, or this process where there is none.
        timeout_s: seconds to wait for other ranks, before it begins and after it has read.
        alone: this process loads by itself, whatever groups exist.
        cast: convert values where the dtype differs.
        partial: leave alone what the checkpoint lacks, and what the state dict lacks.
        progress: True shows a meter, on rank 0; or a function of bytes read and bytes in all.

    Returns:
        What was missing, unexpected and cast.

    Raises:
        NotACheckpoint: nothing is committed at ``path``.
        StateMismatch: all that is missing, unexpected or different; nothing was written.
        ChunkCorrupt: stored bytes are wrong; ``state_dict`` is then partly overwritten.
        RankLost: a rank did not come within ``timeout_s``, or is lost; the message names it.
        LoadFailed: another rank failed, or ranks met different generations.
    """
    ranks = members(process_group, alone=alone, timeout_s=timeout_s)
    with meter(progress, f"load {path}", rank=ranks.rank) as told:
        options = LoadOptions(cast=cast, partial=partial, progress=told)
        return load_into(state_dict, where(path), ranks, options)


def load_state_dict(
    state_dict: State,
    path: PathLike,
    *,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
) -> LoadReport:
    """Wait for the save that ``save_state_dict`` began, then ``load``."""
    global _latest
    previous, _latest = _latest, None
    if previous is not None:
        previous.wait()
    return load(state_dict, path, process_group=process_group, timeout_s=timeout_s)
