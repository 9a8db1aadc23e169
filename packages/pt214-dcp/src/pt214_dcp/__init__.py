"""Asynchronous, crash-safe distributed checkpoints."""

from pt214_dcp.api import async_save, load, load_state_dict, prepare, save, save_state_dict
from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.errors import (
    AlreadyThere,
    BadPath,
    CheckpointError,
    ChunkCorrupt,
    CommitConflict,
    LoadFailed,
    NotACheckpoint,
    NotData,
    OptionError,
    RanksDiffer,
    SaveCancelled,
    SaveFailed,
    StateMismatch,
    StoreError,
)
from pt214_dcp.handle import SaveHandle
from pt214_dcp.load import LoadReport
from pt214_dcp.per_rank import PerRank, Resize
from pt214_dcp.verifier import verify

__all__ = [
    "AlreadyThere",
    "BadPath",
    "CheckpointError",
    "Checkpointer",
    "ChunkCorrupt",
    "CommitConflict",
    "LoadFailed",
    "LoadReport",
    "NotACheckpoint",
    "NotData",
    "OptionError",
    "PerRank",
    "RanksDiffer",
    "Resize",
    "SaveCancelled",
    "SaveFailed",
    "SaveHandle",
    "StateMismatch",
    "StoreError",
    "async_save",
    "load",
    "load_state_dict",
    "prepare",
    "save",
    "save_state_dict",
    "verify",
]
