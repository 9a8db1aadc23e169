"""Asynchronous, crash-safe distributed checkpoints.

Only errors and ``PerRank`` are loaded at once. The rest is looked up when it is first used: it
takes longer to import than a program that only might save a checkpoint should wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pt214_dcp.errors import (
    AlreadyThere,
    BadOption,
    BadPath,
    CheckpointError,
    ChunkCorrupt,
    CommitConflict,
    LoadFailed,
    NotACheckpoint,
    NotData,
    RankLost,
    RanksDiffer,
    SaveCancelled,
    SaveFailed,
    StateMismatch,
    StoreError,
)
from pt214_dcp.per_rank import PerRank, Resize

if TYPE_CHECKING:
    from pt214_dcp.api import async_save, load, load_state_dict, prepare, save, save_state_dict
    from pt214_dcp.checkpointer import Checkpointer
    from pt214_dcp.handle import SaveHandle
    from pt214_dcp.interop.convert import convert
    from pt214_dcp.interop.stock_reader import Reader
    from pt214_dcp.interop.stock_writer import Writer
    from pt214_dcp.loader import LoadReport
    from pt214_dcp.reader import read
    from pt214_dcp.verifier import verify

__all__ = [
    "AlreadyThere",
    "BadOption",
    "BadPath",
    "CheckpointError",
    "Checkpointer",
    "ChunkCorrupt",
    "CommitConflict",
    "LoadFailed",
    "LoadReport",
    "NotACheckpoint",
    "NotData",
    "PerRank",
    "RankLost",
    "RanksDiffer",
    "Reader",
    "Resize",
    "SaveCancelled",
    "SaveFailed",
    "SaveHandle",
    "StateMismatch",
    "StoreError",
    "Writer",
    "async_save",
    "convert",
    "load",
    "load_state_dict",
    "prepare",
    "read",
    "save",
    "save_state_dict",
    "verify",
]

_HOMES = {
    "Checkpointer": "checkpointer",
    "LoadReport": "loader",
    "Reader": "interop.stock_reader",
    "SaveHandle": "handle",
    "Writer": "interop.stock_writer",
    "async_save": "api",
    "convert": "interop.convert",
    "load": "api",
    "load_state_dict": "api",
    "prepare": "api",
    "read": "reader",
    "save": "api",
    "save_state_dict": "api",
    "verify": "verifier",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
