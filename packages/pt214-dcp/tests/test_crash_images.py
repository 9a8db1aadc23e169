"""What a power cut may leave, replayed: unsynced writes lost, torn or reordered, at every moment.

The calls of a save are recorded while it runs. A *crash image* is what the disk may hold if the
machine stops after call ``n``: what was fsynced before is there; of everything else, contents and
names alike, any part may be missing. Each image must load as the old or the new checkpoint, whole.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch

IMAGES = int(os.environ.get("PT214_IMAGES", "3"))  # of each moment


@dataclass
class Inode:
    """A file: its writes, and how many of them the disk is known to have."""

    writes: list[tuple[int, bytes]] = field(default_factory=list)
    synced: int = 0


@dataclass
class Event:
    """One call that changes the disk, as far as a crash can tell it from others."""

    kind: str  # write, sync, sync folder, name, forget
    path: Path
    at: int = 0
    data: bytes = b""
    inode: Inode | None = None


class Recorder:
    """Replaces the calls of ``os`` that a save makes; they still happen."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, []
        self._inodes: dict[tuple[int, int], Inode] = {}
        self._real = {name: getattr(os, name) for name in CALLS}

    events: list[Event]

    def _inode(self, fd: int) -> Inode:
        info = os.fstat(fd)
        return self._inodes.setdefault((info.st_dev, info.st_ino), Inode())

    def _path(self, fd: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{fd}"))

    def _ours(self, path: Any) -> bool:
        return str(path).startswith(str(self.root))

    def open(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        fd: int = self._real["open"](path, flags, *rest, **named)
        if flags & os.O_CREAT and self._ours(path):
            self.events.append(Event("name", Path(path), inode=self._inode(fd)))
        return fd

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        count: int = self._real["pwrite"](fd, data, at)
        self._wrote(fd, at, bytes(data[:count]))
        return count

    def pwritev(self, fd: int, buffers: Any, at: int) -> int:
        count: int = self._real["pwritev"](fd, buffers, at)
        self._wrote(fd, at, b"".join(map(bytes, buffers))[:count])
        return count

    def _wrote(self, fd: int, at: int, data: bytes) -> None:
        if self._ours(self._path(fd)):
            self.events.append(Event("write", self._path(fd), at, data, self._inode(fd)))

    def fsync(self, fd: int) -> None:
        self._real["fsync"](fd)
        path = self._path(fd)
        if self._ours(path):
            folder = path.is_dir()
            inode = None if folder else self._inode(fd)
            self.events.append(Event("sync folder" if folder else "sync", path, inode=inode))

    def mkdir(self, path: Any, *rest: Any, **named: Any) -> None:
        self._real["mkdir"](path, *rest, **named)
        if self._ours(path):
            self.events.append(Event("name", Path(path)))

    def rename(self, source: Any, target: Any) -> None:
        if os.path.isdir(source):
            self._rename_folder(Path(source), Path(target))
            return
        fd = self._real["open"](source, os.O_RDONLY)
        inode = self._inode(fd)
        os.close(fd)
        self._real["rename"](source, target)
        self.events.append(Event("name", Path(target), inode=inode))
        self.events.append(Event("forget", Path(source)))

    def _rename_folder(self, source: Path, target: Path) -> None:
        """As if each name in it were moved: a disk that tears even that is worse than any is."""
        self._real["rename"](source, target)
        self.events.append(Event("name", target))
        for name in os.listdir(target):
            fd = self._real["open"](target / name, os.O_RDONLY)
            self.events.append(Event("name", target / name, inode=self._inode(fd)))
            self.events.append(Event("forget", source / name))
            os.close(fd)
        self.events.append(Event("forget", source))

    def unlink(self, path: Any, *rest: Any, **named: Any) -> None:
        fd = named.get("dir_fd")
        whole = Path(path) if fd is None else self._path(fd) / path
        self._real["unlink"](path, *rest, **named)
        if self._ours(whole):
            self.events.append(Event("forget", whole))

    def rmdir(self, path: Any, *rest: Any, **named: Any) -> None:
        fd = named.get("dir_fd")
        whole = Path(path) if fd is None else self._path(fd) / path
        self._real["rmdir"](path, *rest, **named)
        if self._ours(whole):
            self.events.append(Event("forget", whole))


CALLS = ("open", "pwrite", "pwritev", "fsync", "mkdir", "rename", "unlink", "rmdir")


@contextmanager
def recorded(root: Path) -> Iterator[list[Event]]:
    recorder = Recorder(root)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, getattr(recorder, name))
        yield recorder.events


def image(events: list[Event], moment: int, chance: random.Random) -> dict[Path, Inode | None]:
    """Names and files that the disk may hold after ``moment`` calls; None is a folder."""
    done = events[:moment]
    names: dict[Path, Inode | None] = {}
    for number, event in enumerate(done):
        if event.kind not in ("name", "forget"):
            continue
        sure = any(
            later.kind == "sync folder" and later.path == event.path.parent
            for later in done[number:]
        )
        if not sure and chance.random() < 0.5:
            continue
        if event.kind == "name":
            names[event.path] = event.inode
        else:
            names.pop(event.path, None)
    return names


def content(events: list[Event], moment: int, inode: Inode, chance: random.Random) -> bytes:
    """Bytes that a file may have: all that was synced, of the rest any part."""
    data = bytearray()
    mine = [event for event in events[:moment] if event.inode is inode]
    last = max((n for n, event in enumerate(mine) if event.kind == "sync"), default=-1)
    for number, event in enumerate(mine):
        if event.kind != "write":
            continue
        kept = event.data
        if number > last:
            kept = kept[: chance.choice([0, len(kept) // 2, len(kept)])]
        end = event.at + len(kept)
        if kept:
            data.extend(bytes(max(0, end - len(data))))
            data[event.at : end] = kept
    return bytes(data)


def build(root: Path, target: Path, events: list[Event], moment: int, seed: int) -> None:
    """Make the image of a moment below ``target``; what is not in ``events`` was there before."""
    chance = random.Random(seed)
    for path, inode in sorted(image(events, moment, chance).items()):
        place = target / path.relative_to(root)
        if not place.parent.is_dir():
            continue  # its folder's own name was lost
        if inode is None:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(content(events, moment, inode, chance))


def forgotten(root: Path, target: Path, events: list[Event], moment: int, seed: int) -> None:
    """Of what was there before, remove what was removed by then: any part of it."""
    chance = random.Random(seed)
    made = {event.path for event in events if event.kind == "name"}
    for event in events[:moment]:
        place = target / event.path.relative_to(root)
        if event.kind == "forget" and event.path not in made and chance.random() < 0.5:
            if place.is_dir():
                shutil.rmtree(place, ignore_errors=True)
            else:
                place.unlink(missing_ok=True)


def state(step: int) -> dict[str, Any]:
    return {"a": torch.full((300,), float(step)), "b": torch.full((70, 7), step), "step": step}


def outcomes(tmp_path: Path, save: Callable[[dict[str, Any], Path], object]) -> set[int]:
    """The steps that images of every moment load as; raises if one does not load."""
    root = tmp_path / "c"
    pt214_dcp.save(state(1), root)
    before = tmp_path / "before"
    shutil.copytree(root, before)
    with recorded(root) as events:
        save(state(2), root)
    seen = set()
    for moment in range(len(events) + 1):
        for turn in range(IMAGES):
            target = tmp_path / "image"
            shutil.copytree(before, target)
            seed = 1000 * moment + turn
            build(root, target, events, moment, seed)
            forgotten(root, target, events, moment, seed)
            found = state(0)
            pt214_dcp.load(found, target)
            step = int(found["step"])
            assert bool((found["a"] == step).all())
            assert bool((found["b"] == step).all())
            seen.add(step)
            shutil.rmtree(target)
    return seen


def test_every_crash_image_is_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    assert outcomes(tmp_path, pt214_dcp.save) == {1, 2}


def without(call: str, *kinds: str) -> Callable[[dict[str, Any], Path], object]:
    """A save whose ``call`` does nothing for files or folders."""

    def save(values: dict[str, Any], path: Path) -> None:
        real = getattr(os, call)

        def skip(fd: int) -> None:
            folder = Path(os.readlink(f"/proc/self/fd/{fd}")).is_dir()
            if ("folder" if folder else "file") not in kinds:
                real(fd)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, call, skip)
            pt214_dcp.save(values, path)

    return save


@pytest.mark.parametrize("kinds", [("file",), ("folder",), ("file", "folder")], ids=str)
def test_a_save_without_fsync_loses_a_checkpoint_in_some_image(
    tmp_path: Path, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.IMAGES", 12)
    with pytest.raises((pt214_dcp.CheckpointError, AssertionError)):
        outcomes(tmp_path, without("fsync", *kinds))


def test_a_save_that_does_nothing_shows_no_new_checkpoint(tmp_path: Path) -> None:
    assert outcomes(tmp_path, lambda values, path: None) == {1}
