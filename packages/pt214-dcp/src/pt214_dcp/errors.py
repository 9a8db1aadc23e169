"""Every error of this part: one small tree under ``CheckpointError``.

A message names the file or key, what was found, what is allowed and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class CheckpointError(Exception):
    """Base of every error that pt214_dcp raises on purpose."""


class BadOption(CheckpointError, ValueError):
    """An argument has a value that it can't have."""


class NotData(CheckpointError, TypeError):
    """A value of the state dict is not data (a function, a module, a sparse tensor...)."""


class BadPath(CheckpointError, OSError):
    """The path can't hold a checkpoint: it is a file, or can't be read or written."""


class StoreError(CheckpointError, OSError):
    """An object store did not do what was asked, retries included."""


class NotACheckpoint(CheckpointError, FileNotFoundError):
    """Nothing committed lies at the path."""


class ChunkCorrupt(CheckpointError):
    """Stored bytes are not those that were written, or a record lies about them."""


class SaveFailed(CheckpointError):
    """The save did not commit; what lay at the path before lies there still."""


class AlreadyThere(SaveFailed, FileExistsError):
    """A checkpoint lies at the path, and the save was told not to replace one."""


class CommitConflict(SaveFailed):
    """Another saver committed to the same path since this save began; its checkpoint stays."""


class SaveCancelled(SaveFailed):
    """``SaveHandle.cancel`` ended the save before its commit."""


class RanksDiffer(SaveFailed):
    """Ranks hold other keys, shapes, dtypes or contents where they must be equal."""


class LoadFailed(CheckpointError):
    """Another rank could not load, or ranks met different generations of a checkpoint."""


class RankLost(SaveFailed, LoadFailed):
    """A rank is absent or lost, so a save or load could not begin; the message names it."""


class StateMismatch(CheckpointError):
    """The state dict to fill and the checkpoint differ; nothing was written.

    Attributes:
        missing: keys of the state dict that the checkpoint lacks.
        unexpected: keys of the checkpoint that the state dict lacks.
        different: ``"key: checkpoint has ..., state dict has ..."``, shapes, dtypes and kinds.
    """

    def __init__(
        self, path: str, missing: Sequence[str], unexpected: Sequence[str], different: Sequence[str]
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = tuple(different)
        lines = [f"{path} does not fit the state dict; nothing was loaded."]
        for title, keys in (
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("different", self.different),
        ):
            if keys:
                lines.append(f"  {title} ({len(keys)}):")
                lines += [f"    {key}" for key in keys]
        if any("state" in key.split("/") for key in self.unexpected):
            lines.append(
                "  An optimizer that has made no step has no state to fill. Either read what was "
                "saved, pt214_dcp.read(path), and give it to optimizer.load_state_dict(); or take "
                "the state dict from torch.distributed.checkpoint.state_dict."
                "get_optimizer_state_dict(model, optimizer), which makes the state first."
            )
        super().__init__("\n".join(lines))
