"""Pickles of a few hundred bytes that ask for gigabytes: refused before anything unpickles them."""

from __future__ import annotations

import io
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp.interop import distcp, torch_files
from pt214_dcp.interop.pickles import check_pickle
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ROOM_BYTES = 8 << 20
Peak = Callable[[Callable[[], object]], int]
HUGE = 1 << 40
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu%stQ"


def text(value: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value


def number(value: int) -> bytes:
    return b"\x8a\x08" + struct.pack("<q", value)


def tensor(elements: int, size: int, stride: int) -> bytes:
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + STORAGE % number(elements) + b"K\0"
        + number(size) + b"\x85" + number(stride) + b"\x85\x89ccollections\nOrderedDict\n)RtR."
    )  # fmt: skip


HEX = b"c_codecs\nencode\n(" + text(b"ab") + text(b"hex") + b"tR."
LAUGHS = b"K\x01" + b"2\x86" * 40 + b"."
# Each list is put into the next while it is empty; what it holds comes afterwards.
LATE = b"]\x94]\x94(h\0h\0e0h\0(K\1K\1e."
HOSTILE: dict[str, tuple[bytes, str]] = {
    "memo of billions": (b"K\x01r\xff\xff\xff\xff.", "place 4294967295 of a memo of 0"),
    "memo of text": (b"K\x01p999999999\n.", "place 999999999 of a memo of 0"),
    "long text": (b"\x8d" + struct.pack("<Q", HUGE) + b"abc.", "expected 1099511627776 bytes"),
    "long bytes": (b"\x8e" + struct.pack("<Q", HUGE) + b"abc.", "expected 1099511627776 bytes"),
    "long buffer": (b"\x96" + struct.pack("<Q", HUGE) + b"abc.", "expected 1099511627776|does not"),
    "long number": (b"\x8b" + struct.pack("<i", 4000) + b"\x7f" * 4000 + b".", "a whole number of"),
    "lying number": (b"\x8b" + struct.pack("<i", 1 << 30) + b"\x7f.", "not enough data"),
    "tuples in tuples": (LAUGHS, "once its references are followed"),
    "a list that grows late": (LATE, "grows after it was put in another"),
    "a list in itself": (b"]\x94h\0a.", "grows after it was put in another"),
    "bytearray": (b"cbuiltins\nbytearray\n" + number(HUGE) + b"\x85R.", "bytearray of a int"),
    "hex of hex": (HEX, "other than to latin1"),
    "storage": (b"ctorch.storage\nUntypedStorage\n" + number(HUGE) + b"\x85R.", "does not belong"),
    "new storage": (b"ctorch.storage\nUntypedStorage\n" + number(HUGE) + b"\x85\x81.", "a call of"),
    "tensor": (b"ctorch\nTensor\n" + number(HUGE) + b"\x85R.", "does not belong"),
    "tensor beyond its storage": (tensor(9, HUGE, 1), r"in a storage of 9 elements"),
    "tensor expanded": (tensor(9, HUGE, 0), "expanded too far"),
    "extension": (b"\x82\x01.", "opcode EXT1 does not belong"),
    "empty stack": (b"\x86.", "empty stack"),
    "cut": (b"K\x01", "exhausted|no STOP"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_asks_for_much_is_refused_and_gets_nothing(name: str, peak: Peak) -> None:
    data, words = HOSTILE[name]

    def walk() -> None:
        with pytest.raises(pickle.UnpicklingError, match=words):
            check_pickle(io.BytesIO(data), torch_files.RULES, len(data))

    assert peak(walk) < ROOM_BYTES


def archive(data: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as members:
        members.writestr("archive/data.pkl", data)
        members.writestr("archive/version", b"3\n")
        members.writestr("archive/byteorder", b"little")
        members.writestr("archive/data/0", bytes(36))
    return stream.getvalue()


READ = """
import resource, sys, pt214_dcp, torch
import pt214_dcp.interop.convert, pt214_dcp.interop.distcp, torch.distributed.checkpoint.metadata
from pathlib import Path
if {twin}:
    from pt214_dcp.interop import convert
    convert.check_torch_file = lambda *_, **__: False
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (512 << 20),) * 2)
try:
    pt214_dcp.interop.convert._read_torch(Path({path!r}))
except pt214_dcp.CheckpointError as error:
    print(type(error.__cause__).__name__, error)
"""


def read_apart(path: Path, *, twin: bool = False) -> str:
    """What reading a file says in a process that has half a gigabyte left."""
    code = READ.format(twin=twin, path=str(path))
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_file_that_asks_for_a_terabyte_is_refused_in_half_a_gigabyte(tmp_path: Path) -> None:
    data, _ = HOSTILE["storage"]
    (tmp_path / "a").write_bytes(archive(data))
    assert "does not belong in a checkpoint" in read_apart(tmp_path / "a")
    told = read_apart(tmp_path / "a", twin=True)  # a reader that does not look first asks for it
    assert "does not belong" not in told
    assert "alloc" in told.lower() or "memory" in told.lower()


def test_a_storage_that_claims_more_than_its_entry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(archive(tensor(10, 10, 1)))
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=r"a: a storage of 40 bytes, entry .* has 36"):
        pt214_dcp.convert(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").write_bytes(archive(b"N.").replace(b"data.pkl", b"data.pkX"))
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=r"without data\.pkl"):
        pt214_dcp.convert(tmp_path / "a", tmp_path / "b")


def test_an_older_file_that_claims_more_than_it_is_long_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "a", _use_new_zipfile_serialization=False)
    pt214_dcp.convert(tmp_path / "a", tmp_path / "good")
    assert pt214_dcp.read(tmp_path / "good")["w"].tolist() == [1] * 5
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(data.replace(b"K\x05Ntq", b"J\0\0\0\x7fNtq"))
    with pytest.raises(pt214_dcp.ChunkCorrupt, match="storages of 8522825728 bytes in a file of"):
        pt214_dcp.convert(tmp_path / "a", tmp_path / "b")


def test_what_torch_writes_passes(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    shared = [1, 2]
    state: dict[str, Any] = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "b": b"\xff\0x",
        "bytes": bytearray(b"\xffx"), "c": 1 + 2j, "long": 1 << 200, "twice": [shared, shared],
        "size": torch.Size([3, 4]), "view": torch.arange(10)[2:6], "row": torch.ones(1).expand(99),
        "kinds": [torch.ones(2, dtype=each) for each in (torch.uint16, torch.bfloat16,
                  torch.float8_e4m3fn, torch.bool, torch.complex64)],
        "parameter": torch.nn.Parameter(torch.ones(3)), "ordered": OrderedDict(a=1), "none": None,
    }  # fmt: skip
    for new in (True, False):
        torch.save(state, tmp_path / "a", _use_new_zipfile_serialization=new)
        with open(tmp_path / "a", "rb") as stream:
            assert torch_files.check_torch_file(stream, "a", contents=new) is new


def hostile_metadata(path: Path, change: Any) -> None:
    stock_save({"w": torch.ones(4), "v": torch.ones(4)}, checkpoint_id=path, no_dist=True)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def grow(metadata: Any) -> None:
    kind = metadata.state_dict_metadata["w"]
    kind.size = kind.chunks[0].sizes = torch.Size([HUGE])


def share(metadata: Any) -> None:
    first, second = metadata.storage_data.values()
    second.offset = first.offset


def lengthen(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length += HUGE
        info.offset *= HUGE


def empty(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (grow, "w: 4398046511104 bytes, its parts have"),
        (share, r"\.distcp: two parts share bytes at offset 0"),
        (lengthen, r"\.distcp: [wv]: cut before"),
        (empty, "w: 'int' object is not iterable"),
    ],
)
def test_a_stock_record_that_lies_of_sizes_takes_no_memory(
    tmp_path: Path, change: Any, words: str, peak: Peak
) -> None:
    hostile_metadata(tmp_path, change)

    def read() -> None:
        with pytest.raises(pt214_dcp.ChunkCorrupt, match=words):
            distcp.read_distcp(tmp_path)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak(read) < ROOM_BYTES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_hostile_stock_record_is_refused_by_its_file(tmp_path: Path) -> None:
    for name in ("memo of billions", "long bytes", "tuples in tuples"):
        (tmp_path / ".metadata").write_bytes(HOSTILE[name][0])
        with pytest.raises(pt214_dcp.ChunkCorrupt, match=rf"\.metadata: .*{HOSTILE[name][1]}"):
            distcp.read_distcp(tmp_path)
