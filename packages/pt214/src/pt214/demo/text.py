"""Real text without a download: the sources of Python's own standard library, or the user's."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from pt214.demo.options import DemoError

__all__ = ["CONTEXT", "Windows", "gather", "read"]

CONTEXT = 64  # bytes a window; one more is its last target
SUFFIXES = (".py", ".txt", ".md", ".rst")
MAX_BYTES = 16 << 20  # far more than a demo reads
HELD_OUT = 0.05  # of the text, at its end, for evaluation


def gather(source: Path | None) -> bytes:
    """The text at ``source`` (a file, or a folder's text files in the order of their names).

    Raises:
        DemoError: nothing there, or too little to cut one training and one held-out window.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if source is None else source
    try:
        text = b"\n".join(_pieces(root))[:MAX_BYTES]
    except OSError as error:
        raise DemoError(f"--text {root}: {error.strerror}; name a file or folder") from error
    least = int((CONTEXT + 2) / HELD_OUT) + 1
    if len(text) < least:
        raise DemoError(f"--text {root}: {len(text)} bytes of text; at least {least} are needed")
    return text


def _pieces(root: Path) -> Iterator[bytes]:
    files = sorted(root.rglob("*")) if root.is_dir() else [root]
    total = 0
    for file in files:
        if root.is_dir() and (file.suffix not in SUFFIXES or not file.is_file()):
            continue
        if "site-packages" in file.relative_to(root).parts:
            continue
        piece = file.read_bytes()
        yield piece
        total += len(piece) + 1
        if total > MAX_BYTES:
            return


def read(path: Path) -> tuple[Windows, Windows]:
    """Training and held-out windows of the raw bytes stored at ``path``."""
    text = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    edge = int(len(text) * (1 - HELD_OUT))
    return Windows(text[:edge]), Windows(text[edge:])


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of CONTEXT bytes, half overlapping; the target of each byte is the next one."""

    def __init__(self, text: torch.Tensor) -> None:
        self._text = text  # [N] uint8

    def __len__(self) -> int:
        return (len(self._text) - CONTEXT - 1) // (CONTEXT // 2) + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` and ``y``: [CONTEXT] int64 each."""
        start = index * (CONTEXT // 2)
        window = self._text[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]
