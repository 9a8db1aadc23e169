"""One save from call to commit: plan, stage, agree in the foreground; write, commit behind.

foreground   flatten - plan - stage - agree          all ranks here, all equal, uuid known
background   write files - report - (rank 0: rename COMMIT.json) - outcome - remove the old
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pt214_dcp import commit, files, staging, state
from pt214_dcp.agree import Belief, Ranks, agree
from pt214_dcp.ballot import Ballot
from pt214_dcp.compat import default_store, layout_of
from pt214_dcp.errors import BadPath, SaveCancelled, SaveFailed
from pt214_dcp.handle import SaveHandle
from pt214_dcp.layout import Item, Layout, plan
from pt214_dcp.manifest import RankRecord, TensorRecord
from pt214_dcp.writer import write_rank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)
_RUNNING: weakref.WeakSet[SaveHandle] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class _Job:
    """What the background needs; nothing in it is the caller's any more."""

    path: Path
    ranks: Ranks
    timeout_s: float
    tree: state.Json
    keys: list[str]
    tensors: list[TensorRecord]
    staged: list[staging.Staged]
    buffer: torch.Tensor
    size_bytes: int


def start(
    state_dict: dict[Any, Any],
    path: Path,
    ranks: Ranks,
    timeout_s: float,
    earlier: BaseException | None = None,
) -> SaveHandle:
    """Stage and agree; return the handle of the save that goes on in a thread.

    Args:
        state_dict: nested data.
        path: folder of the checkpoint.
        ranks: who takes part.
        timeout_s: seconds that the background may wait for other ranks.
        earlier: an error of an earlier save to raise now, on all ranks.
    """
    started = time.monotonic()
    job: _Job | None = None
    belief: Belief | None = None
    failure = earlier
    if failure is None:
        try:
            job, belief = _prepare(state_dict, path, ranks, timeout_s)
        except Exception as error:  # carried to all ranks, and raised below
            failure = error
    try:
        uuid = agree(ranks, belief, failure)
        store = default_store() if ranks.world_size > 1 else None
    except BaseException:
        if job is not None:
            staging.ARENA.give(job.buffer)
        raise
    assert job is not None
    handle = SaveHandle(str(path), started, job.size_bytes)
    _RUNNING.add(handle)
    # Not a daemon: the interpreter waits for it at exit, so the last save is whole.
    threading.Thread(target=_run, args=(job, uuid, store, handle), name="pt214_dcp save").start()
    return handle


def _prepare(
    state_dict: dict[Any, Any], path: Path, ranks: Ranks, timeout_s: float
) -> tuple[_Job, Belief]:
    _check_path(path)
    tree, leaves = state.flatten(state_dict)
    items = [
        Item(leaf.key, leaf.tensor.dtype.itemsize, tuple(leaf.tensor.shape), layout)
        for leaf in leaves
        for layout in [layout_of(leaf.key, leaf.tensor, ranks.global_ranks)]
    ]
    staged, size_bytes = staging.place(items, plan(items, ranks.rank))
    pinned = any(leaf.tensor.device.type == "cuda" for leaf in leaves)
    buffer = staging.ARENA.take(size_bytes, pinned=pinned)
    try:
        staging.copy(leaves, staged, buffer)
        belief = _belief(tree, leaves, items, ranks)
    except BaseException:
        staging.ARENA.give(buffer)
        raise
    keys = [leaf.key for leaf in leaves]
    tensors = [TensorRecord(leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in leaves]
    tree = tree if ranks.rank == 0 else None
    return _Job(path, ranks, timeout_s, tree, keys, tensors, staged, buffer, size_bytes), belief


def _check_path(path: Path) -> None:
    """Refuse what can never hold a checkpoint before anything is copied."""
    for folder in (path, *path.parents):
        if folder.is_dir():
            return
        if folder.exists() or folder.is_symlink():
            raise BadPath(
                f"{path}: {folder} is not a folder; a checkpoint is a folder, so choose another "
                "path or move that file away"
            )


def _belief(tree: state.Json, leaves: list[state.Leaf], items: list[Item], ranks: Ranks) -> Belief:
    structure = [
        f"{leaf.tensor.dtype} of {item.shape}{_words(item.layout)}"
        for leaf, item in zip(leaves, items, strict=True)
    ]
    hashes = [0] * len(leaves)
    if ranks.world_size > 1:
        everyone = tuple(range(ranks.world_size))
        for at, (leaf, item) in enumerate(zip(leaves, items, strict=True)):
            if not any(item.layout.splits) and item.layout.ranks == everyone:
                hashes[at] = staging.content_hash(leaf.tensor)

    def describe() -> dict[str, str]:
        told = {
            leaf.key: f"{words} with content {number:x}"
            for leaf, words, number in zip(leaves, structure, hashes, strict=True)
        }
        return _scalars(tree) | told

    shape = files.canonical([tree, [leaf.key for leaf in leaves], structure])
    content = b"".join(number.to_bytes(8, "little") for number in hashes)
    return Belief(_digest(shape), _digest(content), describe)


def _words(layout: Layout) -> str:
    """Nothing for a plain tensor, whose layout goes without saying."""
    if layout.splits == (None,):
        return ""
    return f" over mesh {layout.mesh_shape} of ranks {layout.ranks} as {layout.splits}"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _scalars(tree: state.Json, path: str = "") -> dict[str, str]:
    """Path and text of each value of the tree that is no tensor."""
    if isinstance(tree, dict):
        rows = tree.get("list", tree.get("tuple", ()))
        below: Iterable[tuple[Any, Any]] = enumerate(rows or ())
        if "dict" in tree:
            below = tree["dict"]
        found: dict[str, str] = {}
        for key, item in below:
            found |= _scalars(item, state.join(path, key))
        if found or {"dict", "list", "tuple", "tensor"} & tree.keys():
            return found
    return {path: repr(state.decode_scalar(tree))}


def _run(job: _Job, uuid: str, store: Store | None, handle: SaveHandle) -> None:
    """The background thread, from staged bytes to the handle's last word."""
    generation = f"gen-{uuid}"
    error: BaseException | None = None
    size_bytes: int | None = None
    try:
        deadline = time.monotonic() + job.timeout_s
        ranks, ballot = job.ranks, None
        if store is not None:
            ballot = Ballot(store, uuid, ranks.rank, ranks.world_size, deadline, handle.pause)
        size_bytes = _write_and_commit(job, generation, ballot, handle)
    except BaseException as caught:
        error = caught
    if error is not None and job.ranks.rank != 0 and commit.committed(job.path) == generation:
        error = None  # rank 0 committed, and its store went before its word could be read
    if error is not None:
        _clean_up(job, generation, handle)
        if not isinstance(error, SaveFailed):
            wrapped = SaveFailed(f"{job.path}: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        quiet = isinstance(error, SaveCancelled)
        logger.log(logging.INFO if quiet else logging.WARNING, "save failed: %s", error)
    staging.ARENA.give(job.buffer)
    handle.finish(size_bytes, error)
    if error is None:
        logger.info("%s: durable after %.3f s", job.path, handle.durable_s)


def _write_and_commit(
    job: _Job, generation: str, ballot: Ballot | None, handle: SaveHandle
) -> int | None:
    rank = job.ranks.rank
    data = staging.memory(job.buffer[: job.size_bytes])
    try:
        record = write_rank(
            job.path / generation, rank, job.tree, job.keys, job.tensors, job.staged, data,
            handle.check,
        )  # fmt: skip
        if ballot is None:
            return _commit(job, generation, [record], handle)
        ballot.report(record)
        if rank == 0:
            records = ballot.collect()
            size_bytes = _commit(job, generation, records, handle)
            ballot.announce({"size_bytes": size_bytes})
            return size_bytes
    except BaseException as error:
        if ballot is not None:
            _tell(ballot, error)
        raise
    return int(ballot.outcome()["size_bytes"])


def _commit(job: _Job, generation: str, records: list[RankRecord], handle: SaveHandle) -> int:
    handle.begin_commit()
    previous = commit.committed(job.path)
    commit.commit(job.path, generation, records)
    try:
        commit.remove_old(job.path, previous, stale_s=2 * job.timeout_s)
    except OSError as error:  # the new checkpoint is safe; only space is lost
        logger.warning("%s: could not remove what was replaced: %s", job.path, error)
    return sum(record.data_bytes + record.manifest_bytes for record in records)


def _tell(ballot: Ballot, error: BaseException) -> None:
    try:
        ballot.fail(f"{type(error).__name__}: {error}")
    except Exception as lost:  # the store is gone: the others run into their own timeouts
        logger.warning("could not tell the other ranks that this save failed: %s", lost)


def _clean_up(job: _Job, generation: str, handle: SaveHandle) -> None:
    """Remove what was written for nothing. What may have been committed is never touched."""
    named = commit.committed(job.path)
    if named is None and handle.began_commit:  # the rename may have come through: keep all
        return
    if job.ranks.rank == 0 and named != generation:
        try:
            commit.discard(job.path, generation)
        except OSError as error:
            logger.warning("%s: could not remove %s: %s", job.path, generation, error)


@atexit.register
def _report_unseen() -> None:
    for handle in list(_RUNNING):
        if handle.unseen is not None:
            logger.error("the last save was lost: %s", handle.unseen)
