"""Archives of torch.save from someone hostile: refused before anything in them is unpacked."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pt214_dcp
import pytest
import torch
from pt214_dcp.interop import archives, convert, distcp, torch_files
from torch.distributed.checkpoint.state_dict_saver import save as stock_save

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
BOMB_BYTES = 64 << 20
ROOM_BYTES = 8 << 20
Peak = Callable[[Callable[[], object]], int]


def good() -> bytes:
    stream = io.BytesIO()
    torch.save({"w": torch.arange(1000.0)}, stream)
    return stream.getvalue()


def packed(method: int) -> bytes:
    """What ``good`` holds, compressed, with zeros of 64 MiB in the place of its tensor."""
    stream = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(good())) as stored,
        zipfile.ZipFile(stream, "w", method) as archive,
    ):
        for name in stored.namelist():
            data = bytes(BOMB_BYTES) if name.endswith("data/0") else stored.read(name)
            archive.writestr(name, data)
    return stream.getvalue()


def directory_of(data: bytes, entry: bytes) -> int:
    """Where the directory's record of ``entry`` begins."""
    return data.rindex(b"PK\x01\x02", 0, data.rindex(entry))


def changed(entry: bytes, at: int, code: str, number: int) -> bytes:
    data = bytearray(good())
    struct.pack_into(code, data, directory_of(bytes(data), entry) + at, number)
    return bytes(data)


def shared() -> bytes:
    """Two members of the same bytes."""
    data = good()
    first = struct.unpack_from("<I", data, directory_of(data, b"/data.pkl") + 42)[0]
    return changed(b"/data/0", 42, "<I", first)


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "deflate bomb": (lambda: packed(zipfile.ZIP_DEFLATED), r"compressed \(method 8\)"),
    "bzip2 bomb": (lambda: packed(zipfile.ZIP_BZIP2), r"compressed \(method 12\)"),
    "lzma bomb": (lambda: packed(zipfile.ZIP_LZMA), r"compressed \(method 14\)"),
    "sizes disagree": (lambda: changed(b"/data/0", 24, "<I", 1 << 30), "claims 1073741824"),
    "shared bytes": (shared, "bytes precede it"),
    "encrypted": (lambda: changed(b"/data/0", 8, "<H", 1), "is encrypted"),
    "something before": (lambda: b"\0" * 64 + good(), "bytes before|bytes precede"),
    "something behind": (lambda: good() + b"\0" * 64, "not an archive"),
    "cut": (lambda: good()[:-300], "not an archive"),
    "empty": (bytes, "not an archive"),
}


def refused(read: Callable[[], object], words: str) -> None:
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=words):
        read()


def test_what_torch_writes_is_let_through() -> None:
    sizes = archives.check_archive(io.BytesIO(good()), "x")
    assert sizes["archive/data/0"] == 4000
    archives.check_contents(io.BytesIO(good()), "x")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_by_file_and_takes_no_memory(name: str, peak: Peak) -> None:
    make, words = HOSTILE[name]
    data = make()
    check = lambda: archives.check_archive(io.BytesIO(data), "file.pt")  # noqa: E731
    assert peak(lambda: refused(check, rf"file\.pt.*({words})")) < ROOM_BYTES


def test_a_torch_file_that_is_compressed_is_refused_by_its_entry(
    tmp_path: Path, peak: Peak
) -> None:
    (tmp_path / "a.pt").write_bytes(packed(zipfile.ZIP_DEFLATED))
    words = r"a\.pt: entry 'archive/data.pkl' is compressed"
    read = lambda: pt214_dcp.convert(tmp_path / "a.pt", tmp_path / "b")  # noqa: E731
    assert peak(lambda: refused(read, words)) < ROOM_BYTES
    assert not (tmp_path / "b").exists()


def stock_bomb(path: Path) -> None:
    """A stock checkpoint whose one item is the bomb."""
    stock_save({"w": torch.arange(1000.0)}, checkpoint_id=path, no_dist=True)
    (file,) = path.glob("*.distcp")
    bomb = packed(zipfile.ZIP_DEFLATED)
    metadata = distcp._read_metadata(path)
    for info in metadata.storage_data.values():
        info.length = len(bomb)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    file.write_bytes(bomb)


def test_a_bomb_in_a_stock_checkpoint_is_refused_by_file_and_key(
    tmp_path: Path, peak: Peak
) -> None:
    stock_bomb(tmp_path)
    words = r"__0_0\.distcp at offset 0: w: entry 'archive/data.pkl' is compressed"
    assert peak(lambda: refused(lambda: distcp.read_distcp(tmp_path), words)) < ROOM_BYTES


def test_a_reader_that_unpacks_first_fails_the_bomb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: Peak
) -> None:
    """Twin: it looks at nothing before it holds contents against their crc32."""

    def unpack(stream: io.BytesIO, where: str) -> None:
        with zipfile.ZipFile(stream) as archive:
            for name in archive.namelist():
                archive.read(name)

    stock_bomb(tmp_path)
    monkeypatch.setattr(torch_files, "check_archive", lambda stream, where: {})
    monkeypatch.setattr(torch_files, "check_contents", unpack)

    def read() -> None:
        with pytest.raises(pt214_dcp.CheckpointError):
            distcp.read_distcp(tmp_path)

    assert peak(read) > BOMB_BYTES
    (tmp_path / "a.pt").write_bytes(packed(zipfile.ZIP_DEFLATED))
    monkeypatch.setattr(convert, "check_torch_file", lambda stream, where, contents: True)
    try:  # torch maps the packed bytes: garbage, or an error that is not about compression
        found = convert._read_torch(tmp_path / "a.pt")
    except pt214_dcp.NotACheckpoint:
        return
    assert not torch.equal(found["w"], torch.zeros(1000))
