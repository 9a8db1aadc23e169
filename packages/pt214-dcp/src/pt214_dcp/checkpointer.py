"""A folder of checkpoints by step: when to save, which to keep, where to resume.

    folder/step-0000000100/COMMIT.json ...

What is committed is known from the disk alone, never from memory: ranks may join that took part in
no earlier save. Retention removes only after a commit, so one whole checkpoint is always there.
"""

from __future__ import annotations

import logging
import re
import struct
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pt214_dcp.api import earlier_error, load, prepare
from pt214_dcp.checkpoint import read_commit
from pt214_dcp.commit import committed
from pt214_dcp.errors import BadOption, CheckpointError, NotACheckpoint
from pt214_dcp.exchange import TIMEOUT_S, Ranks, exchange, members
from pt214_dcp.fallback import Met, all_may_go_back, met
from pt214_dcp.handle import SaveHandle
from pt214_dcp.options import save_options
from pt214_dcp.progress import Progress, meter_of
from pt214_dcp.retention import remove_checkpoint
from pt214_dcp.saver import start
from pt214_dcp.stores.place import Where, children
from pt214_dcp.stores.resolve import PathLike, where
from pt214_dcp.verifier import verify

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{10,})")


class Checkpointer:
    """Save every so often, keep the last few, resume from the newest.

    Args:
        folder: holds one checkpoint a step; created by the first save. Or a URL or a place in a
            store, as for ``save``.
        every: save at steps that this divides.
        every_s: save when rank 0's last save began so many seconds ago; costs one exchange of a
            few bytes a call, since clocks differ and all ranks must do the same.
        keep: committed checkpoints to keep; None keeps all.
        process_group: who saves and loads; None is the default group of the moment.
        timeout_s: as ``async_save``.
        staging_bytes: as ``async_save``.
        overlap: as ``async_save``.
        full_every: write only blocks that changed since the save before, and all of them once in
            so many saves; None writes all of them always. Pays where most of the state stands
            still: frozen weights, LoRA, embeddings. Adam's state never does.
        progress: as ``async_save``; of ``restore``, too.

    With neither ``every`` nor ``every_s`` each call of ``save`` saves.

    Raises:
        BadOption: a number is not above 0, or not whole where it must be.
    """

    def __init__(
        self,
        folder: PathLike,
        *,
        every: int | None = None,
        every_s: float | None = None,
        keep: int | None = 3,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float = TIMEOUT_S,
        staging_bytes: int | None = None,
        overlap: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        full_every: int | None = None,
        progress: Progress = False,
    ) -> None:
        for name, count in {"every": every, "keep": keep, "full_every": full_every}.items():
            if count is not None and not (type(count) is int and count > 0):
                raise BadOption(f"{name} is {count!r}; it must be a whole number above 0, or None")
        if every_s is not None and not (type(every_s) in (int, float) and every_s > 0):
            raise BadOption(f"every_s is {every_s!r}; it must be a number above 0, or None")
        meter_of(progress, "")  # raises where it is none
        self.folder = where(folder)
        if full_every is not None and not isinstance(self.folder, Path):
            raise BadOption(
                f"full_every is {full_every!r}, for {self.folder}: saves that write only what "
                "changed link files, which only a file system can do"
            )
        self.handle: SaveHandle | None = None
        self._every, self._every_s, self._keep = every, every_s, keep
        self._group, self._full_every = process_group, full_every
        self._options = save_options(
            timeout_s=timeout_s, staging_bytes=staging_bytes, overlap=overlap,
            hashes=full_every is not None,
        )  # fmt: skip
        self._progress = progress
        self._saves = 0
        self._damaged: set[int] = set()  # found by restore; rank 0's counts
        self._last_s = time.monotonic()

    def save(
        self, step: int, state_dict: dict[Any, Any], *, force: bool = False
    ) -> SaveHandle | None:
        """Begin a save if it is time; collective. The error of the save before is raised here.

        Args:
            step: of the training, 0 or more, equal on all ranks.
            state_dict: as for ``async_save``.
            force: save whether it is time or not, as at the end of training.

        Returns:
            The handle, or None when it is not time.
        """
        if type(step) is not int or step < 0:
            raise BadOption(f"step is {step!r}; it must be a whole number, 0 or more")
        if not force and not self._due(step):
            return None
        earlier = None if self.handle is None else earlier_error(self.handle)
        self.handle = None
        self._last_s = time.monotonic()
        ranks = self._ranks()
        if ranks.rank == 0:
            self._prune(before=step)
        told = meter_of(self._progress, f"save step {step}", rank=ranks.rank)
        options = replace(self._options, base=self._base(ranks), progress=told)
        self._saves += 1
        self.handle = start(state_dict, self.path(step), ranks, options, earlier=earlier)
        self.handle.on_commit(lambda: self._committed(step) if ranks.rank == 0 else None)
        return self.handle

    def prepare(self, state_dict: dict[Any, Any]) -> None:
        """Before training: have memory and plan ready, so that the first save blocks no longer."""
        prepare(state_dict, process_group=self._group, staging_bytes=self._options.staging_bytes)

    def restore(self, state_dict: dict[Any, Any], *, fallback: bool = False) -> int:
        """Load the newest checkpoint into ``state_dict`` and return its step; collective.

        Args:
            state_dict: as for ``load``.
            fallback: where the newest is damaged, load the newest that is not, on all ranks. What
                was damaged is logged, stays on the disk until a later save's retention, and is
                neither counted as kept nor taken as a base meanwhile.

        Raises:
            NotACheckpoint: the folder holds none.
            ChunkCorrupt: it is damaged; with ``fallback``, all are, and this is the newest's error.
            CheckpointError: as ``load``.
        """
        self.wait()
        ranks = self._ranks()
        first: Exception | None = None
        while (step := _agreed(ranks, self._rooted())) is not None:
            try:
                load(
                    state_dict, self.path(step), process_group=self._group,
                    timeout_s=self._options.timeout_s, progress=self._progress,
                )  # fmt: skip
                return step
            except Exception as error:
                if not fallback and met(error) is Met.DAMAGE:
                    error.add_note("restore(fallback=True) loads the newest that is not damaged")
                if not fallback or not all_may_go_back(ranks, error):
                    raise
                first = first or error
                self._damaged.add(step)
                logger.warning("step %d is damaged, so an older one is tried: %s", step, error)
        if first is not None:
            self._damaged.clear()  # nothing is left to go back to: they are what there is
            raise first
        raise NotACheckpoint(f"{self.folder}: no committed checkpoint to restore")

    def latest_valid(self) -> int | None:
        """The newest step of which every byte fits its checksum, or None.

        Not collective, and reads whole checkpoints: to resume, ``restore(fallback=True)`` reads
        only what each rank loads.
        """
        for step in sorted((step for step, _ in self._folders()), reverse=True):
            if not _root(self.path(step)):
                continue
            try:
                verify(self.path(step))
                return step
            except (CheckpointError, OSError) as error:
                if met(error) is not Met.DAMAGE:
                    raise
                logger.warning("step %d is damaged: %s", step, error)
        return None

    def steps(self) -> list[int]:
        """Steps whose checkpoints are committed, rising."""
        return sorted(step for step, path in self._folders() if committed(path) is not None)

    def latest(self) -> int | None:
        """The newest committed step, or None."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Where:
        """Folder of the checkpoint of ``step``."""
        return self.folder / f"step-{step:010d}"

    def wait(self) -> None:
        """Wait for the save under way and raise its error."""
        if self.handle is not None and not self.handle.cancelled:
            self.handle.wait()

    def cancel(self) -> bool:
        """Abandon the save under way, as when its peers are lost; the next ``save`` just works."""
        return self.handle is not None and self.handle.cancel()

    def _due(self, step: int) -> bool:
        if self._every is not None and step % self._every == 0:
            return True
        if self._every_s is None:
            return self._every is None
        due = time.monotonic() - self._last_s >= self._every_s
        return exchange(self._ranks(), bytes([due]))[0] == b"\1"

    def _ranks(self) -> Ranks:
        return members(self._group, timeout_s=self._options.timeout_s)

    def _base(self, ranks: Ranks) -> Where | None:
        """The newest checkpoint, as rank 0 sees it, if this save is an incremental one."""
        if self._full_every is None or self._saves % self._full_every == 0:
            return None
        step = _agreed(ranks, self._whole())
        return None if step is None else self.path(step)

    def _whole(self) -> list[int]:
        """Steps that are committed and of which no damage is known."""
        return [step for step in self.steps() if step not in self._damaged]

    def _rooted(self) -> list[int]:
        """Steps that have a root record, if a damaged one, and of which no damage is known."""
        return [step for step, path in self._folders() if step not in self._damaged and _root(path)]

    def _committed(self, step: int) -> None:
        self._damaged.discard(step)  # replaced
        self._prune(before=step)

    def _folders(self) -> list[tuple[int, Where]]:
        found = ((_STEP.fullmatch(path.name), path) for path in children(self.folder))
        return [(int(match[1]), path) for match, path in found if match]

    def _prune(self, before: int) -> None:
        """Remove committed steps beyond ``keep``, and older ones that were never committed."""
        if self._keep is None:
            return
        kept = self._whole()[-self._keep :]
        for step, path in self._folders():
            if kept and step not in kept and step < max(kept[0], before):
                try:
                    remove_checkpoint(path)
                    logger.info("removed the checkpoint of step %d", step)
                except OSError as error:  # space is all it costs; the next save tries again
                    logger.warning("could not remove the checkpoint of step %d: %s", step, error)


def _root(path: Where) -> bool:
    """Whether a record lies there: a damaged one says that something was committed."""
    try:
        read_commit(path)
    except NotACheckpoint:
        return False
    except CheckpointError:
        return True
    return True


def _agreed(ranks: Ranks, steps: Iterable[int]) -> int | None:
    """Rank 0's newest: another rank may not see the newest folder yet, or may see a newer one."""
    newest = max(steps, default=-1)
    step = int(struct.unpack("<q", exchange(ranks, struct.pack("<q", newest))[0])[0])
    return None if step < 0 else step
