"""One save from call to commit.

    foreground   take apart - agree - plan - copy       all ranks here, all equal, uuid known
    background   write - report - (rank 0: rename COMMIT.json) - outcome - remove the old

``save`` waits for the background, so its tensors are written from where they lie; after
``async_save`` training goes on, so they are copied first, window by window within the budget.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from pt214_dcp import commit, leftovers
from pt214_dcp.agree import Agreement, Claim, agree
from pt214_dcp.ballot import Ballot
from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.compat import default_store
from pt214_dcp.errors import (
    AlreadyThere,
    BadOption,
    BadPath,
    CheckpointError,
    CommitConflict,
    NotACheckpoint,
    SaveCancelled,
    SaveFailed,
)
from pt214_dcp.exchange import Ranks
from pt214_dcp.feed import Feed, feed_of
from pt214_dcp.handle import SaveHandle
from pt214_dcp.incremental import Base, base_of
from pt214_dcp.options import SaveOptions
from pt214_dcp.rank_files import RankFiles, Report, write_rank
from pt214_dcp.root import Commit
from pt214_dcp.staging import content_hash
from pt214_dcp.stores.place import Place, Where
from pt214_dcp.structure import Structure, replica_hashes, structure_of
from pt214_dcp.trees import values_of

logger = logging.getLogger(__name__)
_LOST: list[SaveHandle] = []  # saves that failed in the background, until somebody was told


def start(
    state_dict: dict[Any, Any],
    path: Where,
    ranks: Ranks,
    options: SaveOptions,
    *,
    blocking: bool = False,
    earlier: BaseException | None = None,
) -> SaveHandle:
    """Agree and copy; return the handle of the save that goes on in a thread.

    Args:
        state_dict: nested data.
        path: folder of the checkpoint.
        ranks: who takes part.
        options: what the caller chose.
        blocking: the caller waits, so tensors may be written from where they lie.
        earlier: an error of an earlier save to raise now, on all ranks.
    """
    started = time.monotonic()
    structure: Structure | None = None
    claim: Claim | None = None
    base, seen = Base(), commit.Seen()
    failure = earlier or _forgotten()
    if failure is None:
        try:
            _check_path(path, options)
            if ranks.rank == 0:
                seen = commit.seen(path)
            structure = structure_of(state_dict, ranks.global_ranks)
            base = _base(path, options, ranks.rank)
            claim = _claim(structure, ranks, options)
        except Exception as error:  # carried to all ranks, and raised below
            failure = error
    agreement = agree(ranks, claim, failure)
    assert structure is not None
    save = _Save(path, ranks, options, agreement.uuid, base, seen, started)
    return save.begin(structure, agreement, blocking)


def _check_path(path: Where, options: SaveOptions) -> None:
    """Refuse what can never hold a checkpoint before anything is copied."""
    if isinstance(path, Path):
        _check_folder(path)
    if not options.overwrite and commit.committed(path) is not None:
        raise AlreadyThere(
            f"{path}: a checkpoint lies here, and overwrite is False; choose another path"
        )


def _check_folder(path: Path) -> None:
    try:
        path.is_dir()
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long a name, a NUL in it...
        if not isinstance(error, NotADirectoryError):
            raise BadPath(f"{str(path)!r} can't be a folder: {error}") from error
    for folder in (path, *path.parents):
        if folder.is_dir():
            return
        if folder.exists() or folder.is_symlink():
            raise BadPath(
                f"{path}: {folder} is not a folder; a checkpoint is a folder, so choose another "
                "path or move that file away"
            )


def _base(path: Where, options: SaveOptions, rank: int) -> Base:
    if options.base is None:
        return Base(known={}) if options.hashes else Base()
    if not (isinstance(path, Path) and isinstance(options.base, Path)):
        raise BadOption(
            f"base is {options.base}, for a save to {path}: an incremental save links files, which "
            "only a file system can do; leave base out"
        )
    try:
        return base_of(open_checkpoint(options.base), rank)
    except NotACheckpoint:
        logger.info("%s: no checkpoint at %s yet, so everything is written", path, options.base)
        return Base(known={})


def _claim(structure: Structure, ranks: Ranks, options: SaveOptions) -> Claim:
    label = structure.label()
    if options.key_group is not None:
        label = hashlib.blake2b(options.key_group.encode(), digest_size=8).digest()
    replicas = replica_hashes(structure, ranks.rank, label) if ranks.world_size > 1 else {}

    def describe(name: bytes | None) -> dict[str, str]:
        found = values_of(structure.flat.tree) | structure.describe()
        if name is None:
            return found
        rows = zip(structure.keys, structure.tensors, structure.layouts, strict=True)
        whole = {
            key: f"{found[key]} with content {content_hash(tensor):x}"
            for key, tensor, layout in rows
            if key and (layout is None) == (name == label)
        }
        return whole

    return Claim(label, structure.digest, replicas, describe)


class _Save:
    """One save: what its foreground has found and its background needs."""

    def __init__(
        self, path: Where, ranks: Ranks, options: SaveOptions, uuid: str, base: Base,
        seen: commit.Seen, started: float,
    ) -> None:  # fmt: skip
        self.path, self.ranks, self.options = path, ranks, options
        self.generation, self.base = f"gen-{uuid}", base
        self.seen = seen
        self.handle = SaveHandle(str(path), started, 0, options.progress)
        self.ballot: Ballot | None = None
        if ranks.world_size > 1:
            self.ballot = Ballot(
                default_store(), uuid, ranks.rank, ranks.world_size, started + options.timeout_s,
                self.handle.pause,
            )  # fmt: skip
        self.rank_files: RankFiles
        self.feed: Feed

    def begin(self, structure: Structure, agreement: Agreement, blocking: bool) -> SaveHandle:
        """Start the background, copy what it needs, and return the handle.

        Raises:
            SaveFailed: it could not be started; the other ranks are told, since they have agreed.
        """
        try:
            self._plan(structure, agreement, blocking)
            # Not a daemon: the interpreter waits for it at exit, so the last save is whole.
            threading.Thread(target=self._run, name="pt214_dcp save").start()
        except BaseException as error:
            if self.ballot is not None:
                _tell(self.ballot, error)
            failed = self._failed(error)
            self.handle.finish(None, failed)
            raise (failed if isinstance(error, Exception) else error) from error
        self.feed.fill()
        self.handle.staged_after_call()
        return self.handle

    def _plan(self, structure: Structure, agreement: Agreement, blocking: bool) -> None:
        table = structure.table(agreement.members)
        self.rank_files = RankFiles.of(structure, table, agreement, self.ranks.rank, self.base)
        plan = self.rank_files.plan
        self.handle.rank_size_bytes = plan.size_bytes
        tensors = [*structure.tensors, *self.rank_files.own_tensors]
        self.feed = feed_of(plan, tensors, self.options, blocking, self.handle)

    def _run(self) -> None:
        """The background thread, to the handle's last word."""
        error: BaseException | None = None
        size_bytes: int | None = None
        try:
            folder = self.path / self.generation  # one rank's beat is enough: the one that commits
            with leftovers.alive(folder) if self.ranks.rank == 0 else contextlib.nullcontext():
                size_bytes = self._write_and_commit()
        except BaseException as caught:
            error = caught
        finally:
            self.feed.drain()
        try:
            other = error is not None and self.ranks.rank != 0
            if other and commit.committed(self.path) == self.generation:
                error = None  # rank 0 committed, and its store went before its word could be read
            if error is not None:
                error = self._failed(error)
        finally:  # whatever tidying meets, those who wait must hear of the end
            if error is not None and not self.handle.cancelled:
                _LOST.append(self.handle)
            self.handle.finish(size_bytes, error)
        if error is None:
            logger.info("%s: durable after %.3f s", self.path, self.handle.durable_s)

    def _write_and_commit(self) -> int | None:
        try:
            folder = self.path / self.generation
            report = write_rank(folder, self.rank_files, self.feed, self.handle)
            if self.ballot is None:
                return self._commit({0: report})
            reports = self.ballot.report(report.pack())
            if self.ranks.rank == 0:
                size_bytes = self._commit(
                    {rank: Report.unpack(data) for rank, data in reports.items()}
                )
                self.ballot.announce({"size_bytes": size_bytes})
                return size_bytes
        except BaseException as error:
            if self.ballot is not None:
                if isinstance(error, FileNotFoundError):
                    # Rank 0 removes what is written for nothing: tell why, not what is gone.
                    self.ballot.raise_if_failed()
                _tell(self.ballot, error)
            raise
        return int(self.ballot.outcome()["size_bytes"])

    def _commit(self, reports: dict[int, Report]) -> int:
        self.handle.begin_commit()
        previous = commit.previous(self.path, self.seen)
        if previous is not None and not self.options.overwrite:
            raise AlreadyThere(f"{self.path}: another saver committed here meanwhile")
        root: Commit = commit.commit(self.path, self.generation, reports, self.seen)
        try:
            commit.remove_old(self.path, previous, stale_s=2 * self.options.timeout_s)
        except (CheckpointError, OSError) as error:  # the new one is safe; only space is lost
            logger.warning("%s: could not remove what was replaced: %s", self.path, error)
        return root.size_bytes

    def _failed(self, error: BaseException) -> SaveFailed:
        """Remove what was written for nothing. What may have been committed is never touched."""
        named = commit.committed(self.path)
        unsure = named is None and self.handle.began_commit  # the rename may have come through
        if isinstance(self.path, Place) and not isinstance(error, CommitConflict):
            unsure = self.handle.began_commit  # a request that was given up may still arrive
        if self.ranks.rank == 0 and named != self.generation and not unsure:
            try:
                commit.discard(self.path, self.generation)
            except OSError as failed:
                logger.warning("%s: could not remove %s: %s", self.path, self.generation, failed)
        quiet = isinstance(error, SaveCancelled)
        logger.log(logging.INFO if quiet else logging.WARNING, "save failed: %s", error)
        if isinstance(error, SaveFailed):
            return error
        wrapped = SaveFailed(f"{self.path}: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped


def _tell(ballot: Ballot, error: BaseException) -> None:
    try:
        ballot.fail(f"{type(error).__name__}: {error}")
    except Exception as lost:  # the store is gone: the others run into their own timeouts
        logger.warning("could not tell the other ranks that this save failed: %s", lost)


def _forgotten() -> BaseException | None:
    """The first error that nobody has been told of; from here on somebody has."""
    first: BaseException | None = None
    while _LOST and _LOST[0].done():
        handle = _LOST.pop(0)
        error = handle.unseen
        if error is None:
            continue
        if first is None:
            first = handle.exception()
            error.add_note(f"so an earlier save to {handle.path} was lost; nothing new was begun")
        else:
            logger.error("another save was lost, too, to %s: %s", handle.path, error)
    return first


@atexit.register
def _report_unseen() -> None:
    for handle in _LOST:
        if handle.unseen is not None:
            logger.error("the save to %s was lost: %s", handle.path, handle.unseen)
