"""A checkpoint from someone hostile: every record may lie, and every digest is right.

Records are decoded, changed at random places, signed anew and read. Whatever they say, a reader
raises an error of this part or reads what is there; it opens nothing outside the folder, allocates
no more than the template, the files and a little, and comes to an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pt214_dcp
import pytest
import torch
from pt214_dcp import files
from pt214_dcp.__main__ import main

COUNT = int(os.environ.get("PT214_HOSTILE", "600"))
ROOM_BYTES = 256 << 20  # beyond what the process has already
DEADLINE_S = 20  # of one reader; the honest one takes milliseconds
NUMBERS = (0, -1, 1, 2, 7, 255, 1 << 16, 1 << 31, 1 << 40, (1 << 62) + 1, (1 << 63) - 1)
TEXTS = (
    "", "..", "../../outside", "../../../outside", "/etc/passwd", "/etc/hostname", "x" * 5000,
    "a\0b", "from-" + "0" * 32 + "-../x.data", "__import__", "float32", "load",
    "gen-" + "0" * 32,
)  # fmt: skip


def template() -> dict[str, Any]:
    shared = torch.zeros(50)
    return {
        "w": torch.zeros(300, 5), "tied": [shared, shared], "view": shared[10:20],
        "half": torch.zeros(7, dtype=torch.bfloat16), "n": 3, "text": "x", "pair": (1, 2.5),
        "own": pt214_dcp.PerRank({"seed": torch.zeros(4)}),
    }  # fmt: skip


class Book:
    """The records of a checkpoint of one rank, decoded; ``write`` signs them anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = json.loads((path / "COMMIT.json").read_bytes())["body"]
        self.folder = path / self.root["generation"]
        (manifest,) = self.folder.glob("*.manifest")
        self.parts = {
            "table-00000": msgspec.msgpack.decode((self.folder / "table-00000").read_bytes()),
            manifest.name: msgspec.msgpack.decode(manifest.read_bytes()),
        }
        self.index = list(struct.unpack("<QQI16s", (self.folder / "index").read_bytes()))

    def write(self, name: str, garble: Callable[[bytes], bytes] = bytes) -> None:
        """Write all records; ``garble`` changes the bytes of ``name`` before they are signed."""
        packed = {key: msgspec.msgpack.encode(body) for key, body in self.parts.items()}
        if name in packed:
            packed[name] = garble(packed[name])
        for key, data in packed.items():
            (self.folder / key).write_bytes(data)
            if key.endswith(".manifest") and name != "index":
                self.index[0], self.index[3] = len(data), files.digest(data)
        page = struct.pack("<QQI16s", *self.index)
        if name == "index":
            page = garble(page)
        (self.folder / "index").write_bytes(page)
        if name != "COMMIT.json":
            table = packed["table-00000"]
            self.root["tables"] = [[len(table), files.digest(table).hex()]]
            self.root["pages"] = [files.digest(page).hex()]
        (self.path / "COMMIT.json").write_bytes(files.pack(self.root))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of everything inside ``value``."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def lie(value: Any, chance: random.Random) -> Any:
    """Something else in the place of ``value``, of the same kind more often than not."""
    if chance.random() < 0.15:
        return chance.choice([None, {}, [], "", 1, -1.5, b"", True])
    if isinstance(value, bytes):
        return lying_column(value, chance)
    if isinstance(value, int):
        return chance.choice(
            [*NUMBERS, *(min(n, (1 << 64) - 1) for n in (value + 1, value * 1000))]
        )
    if isinstance(value, str):
        return chance.choice(TEXTS)
    if isinstance(value, list) and value:
        return chance.choice([value[:-1], value * 1000, [*value, value[0]], value[::-1]])
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        return {k: v for k, v in value.items() if k != key}
    return chance.choice([*NUMBERS, *TEXTS])


def lying_column(data: bytes, chance: random.Random) -> bytes:
    number = struct.pack("<q", chance.choice(NUMBERS))
    at = chance.randrange(max(1, len(data)))
    at -= at % 8
    return chance.choice(
        [data[:at], data * 50, data[:at] + number + data[at + 8 :], data + number, number * 3]
    )


def garbled(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 3])):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def make_hostile(path: Path, seed: int) -> None:
    """Change one record of a good checkpoint, and sign it."""
    chance, book = random.Random(seed), Book(path)
    name = chance.choice(["COMMIT.json", "index", *book.parts, *book.parts, *book.parts])
    if name in book.parts and chance.random() < 0.15:
        book.write(name, lambda data: garbled(data, chance))
        return
    if name == "index":
        book.index[chance.randrange(3)] = chance.choice([n for n in NUMBERS if 0 <= n < 1 << 32])
        book.write(name)
        return
    record = book.root if name == "COMMIT.json" else book.parts[name]
    for _ in range(chance.choice([1, 1, 2])):
        *above, last = chance.choice(list(places(record)))
        within = record
        for key in above:
            within = within[key]
        told = lie(within[last], chance)
        within[last] = "" if told == b"" else told  # JSON has no bytes
    book.write(name)


READERS: dict[str, Callable[[Path], object]] = {
    "load": lambda path: pt214_dcp.load(template(), path),
    "partial": lambda path: pt214_dcp.load(template(), path, partial=True, cast=True),
    "verify": pt214_dcp.verify,
    "read": pt214_dcp.read,
}


def limit_memory() -> None:
    with open("/proc/self/statm") as stream:
        now = int(stream.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM_BYTES, resource.RLIM_INFINITY))


def attack(folder: Path, seeds: range, twin: str = "") -> Counter[str]:
    """What became of each reader of each hostile checkpoint; anything but an error of ours raises.

    Runs in a process of its own: it limits its memory and watches what is opened. ``twin`` is code
    that breaks the reader.
    """
    opened: list[Any] = []
    good, earlier = folder / "good", folder / "earlier"
    pt214_dcp.save(template(), earlier, hashes=True)
    pt214_dcp.save(template() | {"w": torch.ones(300, 5)}, good, base=earlier)  # links a file
    for read in READERS.values():  # what is imported late is imported now
        with contextlib.suppress(pt214_dcp.LoadFailed):  # ``read`` can't give PerRank
            read(good)
    exec(twin)
    limit_memory()
    sys.addaudithook(lambda event, values: opened.extend(values[:1] if event == "open" else ()))
    outcome: Counter[str] = Counter()
    allowed = (f"{folder}/bad/", "/proc/", "/sys/")
    for seed in seeds:
        shutil.rmtree(folder / "bad", ignore_errors=True)
        shutil.copytree(good, folder / "bad")
        make_hostile(folder / "bad", seed)
        for name, read in READERS.items():
            opened.clear()
            signal.alarm(DEADLINE_S)
            try:
                read(folder / "bad")
                outcome["read what is there"] += 1
            except pt214_dcp.CheckpointError as error:
                outcome[type(error).__name__] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}, {name}") from error
            signal.alarm(0)
            paths = [os.path.abspath(path) for path in opened if not isinstance(path, int)]
            outside = [path for path in paths if not path.startswith(allowed)]
            assert not outside, f"seed {seed}, {name}: {outside}"
    return outcome


def run_attack(folder: Path, first: int, last: int, twin: str = "") -> Any:
    code = (
        "import faulthandler; faulthandler.enable(); "
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; from test_hostile import attack; import json; "
        f"print(json.dumps(attack(Path({str(folder)!r}), range({first}, {last}), {twin!r})))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=550)


def test_no_lie_does_more_than_raise(tmp_path: Path) -> None:
    done = run_attack(tmp_path, 0, COUNT)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout)
    assert sum(outcome.values()) == COUNT * len(READERS)
    assert outcome["ChunkCorrupt"] > COUNT  # most lies are noticed, and none of them by chance
    assert outcome["read what is there"] > 0  # some tell of another value, which is their right


def test_a_reader_that_trusts_names_fails_the_attack(tmp_path: Path) -> None:
    """Twin: any text is the name of a linked data file."""
    twin = "import re; from pt214_dcp import manifest; manifest.LINKED = re.compile('.*', re.S)"
    done = run_attack(tmp_path, 0, max(COUNT, 600), twin)
    assert done.returncode != 0
    assert "AssertionError: seed" in done.stderr


def grown_mib(path: Path, before: str = "") -> float:
    """Load and verify the checkpoint in a process of its own; how far its memory rose."""
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import pt214_dcp, torch
from test_hostile import READERS
{before}
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
pt214_dcp.save({{"w": torch.ones(3)}}, {str(path / "warm")!r})
pt214_dcp.read({str(path / "warm")!r})
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
now = peak()
for read in READERS.values():
    try:
        read(Path({str(path / "c")!r}))
    except pt214_dcp.CheckpointError:
        pass
print(peak() - now)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_a_tensor_that_claims_to_be_huge_takes_no_memory(tmp_path: Path) -> None:
    """Its shape and its chunk agree, so only the checksums that are missing tell."""
    pt214_dcp.save({"w": torch.ones(300)}, tmp_path / "c")
    book = Book(tmp_path / "c")
    manifest = next(key for key in book.parts if key.endswith(".manifest"))
    huge = struct.pack("<q", 10_000_000 * (1 << 18))  # ten million blocks
    book.parts["table-00000"]["shape"] = book.parts[manifest]["chunk_size"] = huge
    book.write("")
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="1 checksums for 10000000 blocks"):
        pt214_dcp.verify(tmp_path / "c")
    assert grown_mib(tmp_path) < 40
    twin = (
        "from pt214_dcp import manifest; real = manifest._check; "
        "manifest._check = lambda m: (m.block_sizes, real(m))"
    )
    assert grown_mib(tmp_path, twin) > 60


def test_names_that_lead_outside_are_refused_everywhere(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    pt214_dcp.save(template(), tmp_path / "c")
    for name in ("../../outside", str(tmp_path / "outside"), "from-" + "0" * 32 + "-../../outside"):
        book = Book(tmp_path / "c")
        manifest = next(key for key in book.parts if key.endswith(".manifest"))
        body = book.parts[manifest]
        blocks = len(body["checksums"]) // 8
        body["files"] = [name]
        body["block_file"] = struct.pack(f"<{blocks}H", *[1] * blocks)
        body["block_offset"] = struct.pack(f"<{blocks}q", *[0] * blocks)
        book.write(manifest)
        for read in (READERS["load"], READERS["verify"]):
            with pytest.raises(pt214_dcp.ChunkCorrupt, match="is no data file of an earlier"):
                read(tmp_path / "c")
        assert main(["cat", str(tmp_path / "c"), "w", "--slice", "0:2,:"]) == 1


def test_a_data_file_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    pt214_dcp.save(template(), tmp_path / "c")
    (data,) = (tmp_path / "c").glob("gen-*/*.safetensors")
    content = data.read_bytes()
    (tmp_path / "elsewhere").write_bytes(content)
    data.unlink()
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="symbolic link"):
        READERS["load"](tmp_path / "c")
    data.unlink()
    os.mkfifo(data)
    with pytest.raises(pt214_dcp.CheckpointError):
        READERS["load"](tmp_path / "c")
