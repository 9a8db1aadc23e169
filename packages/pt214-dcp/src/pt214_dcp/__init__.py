"""Asynchronous, crash-safe distributed checkpoints.

``Writer``, ``Reader`` and ``convert`` are looked up when first used: they need all of
``torch.distributed.checkpoint``, which takes long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pt214_dcp.api import async_save, load, load_state_dict, prepare, save, save_state_dict
from pt214_dcp.checkpointer import Checkpointer
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

if TYPE_CHECKING:
    from pt214_dcp.interop.convert import convert
    from pt214_dcp.interop.stock_reader import Reader
    from pt214_dcp.interop.stock_writer import Writer

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
    "save",
    "save_state_dict",
    "verify",
]

_LATER = {"Reader": "stock_reader", "Writer": "stock_writer", "convert": "convert"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        return getattr(import_module(f"pt214_dcp.interop.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
