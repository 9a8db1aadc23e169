"""Asynchronous, crash-safe distributed checkpoints."""

from pt214_dcp.api import async_save, load, load_state_dict, save, save_state_dict
from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.errors import (
    BadPath,
    CheckpointError,
    ChunkCorrupt,
    LoadFailed,
    NotACheckpoint,
    NotData,
    RanksDiffer,
    SaveCancelled,
    SaveFailed,
    StateMismatch,
)
from pt214_dcp.handle import SaveHandle
from pt214_dcp.verifier import verify

__all__ = [
    "BadPath",
    "CheckpointError",
    "Checkpointer",
    "ChunkCorrupt",
    "LoadFailed",
    "NotACheckpoint",
    "NotData",
    "RanksDiffer",
    "SaveCancelled",
    "SaveFailed",
    "SaveHandle",
    "StateMismatch",
    "async_save",
    "load",
    "load_state_dict",
    "save",
    "save_state_dict",
    "verify",
]
