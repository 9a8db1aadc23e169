"""One contract, held against every kind of store."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from pt214_dcp.errors import BadOption, BadPath, CommitConflict, SaveCancelled
from pt214_dcp.stores import Place, Store, StoreOptions, open_store
from pt214_dcp.stores.objects import joined

_names = itertools.count()
KINDS = ["folder", "memory", "fsspec", "s3"]


def nothing() -> None:
    """A check that never stops."""


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(tmp_path / "store")
    if request.param == "memory":
        return open_store(f"memory://contract{next(_names)}")
    if request.param == "fsspec":
        pytest.importorskip("fsspec")
        return open_store(f"local://{tmp_path / 'store'}")
    place = request.getfixturevalue("s3")
    assert isinstance(place, Place)
    return place.store


def test_what_is_written_is_read_in_any_range(store: Store) -> None:
    data = bytes(range(256)) * 40
    view = memoryview(data)
    assert store.write_new("a/b", [view[:100], view[100:101], view[101:]], nothing) == len(data)
    assert store.size("a/b") == len(data)
    for offset, size in [(0, None), (0, 0), (0, 10), (7, 90), (200, None), (10239, 1), (0, 99999)]:
        stop = None if size is None else offset + size
        assert store.read("a/b", offset, size) == data[offset:stop]
    into = bytearray(50)
    assert store.read_into("a/b", 30, memoryview(into)) == 50
    assert into == data[30:80]


def test_an_existing_name_is_never_written_again(store: Store) -> None:
    store.write_new("a", [memoryview(b"old")], nothing)
    with pytest.raises(FileExistsError):
        store.write_new("a", [memoryview(b"new")], nothing)
    large = memoryview(bytes(20 << 20))
    with pytest.raises(FileExistsError):
        store.write_new("a", [large], nothing)
    assert store.read("a") == b"old"


def test_nothing_there_is_said_as_such(store: Store) -> None:
    for call in (store.read, store.size):
        with pytest.raises(FileNotFoundError):
            call("no/such")
    assert store.read_root("no/root") == (b"", None)
    store.delete(["no/such"])
    assert [*store.list("no")] == []


def test_the_memory_of_a_part_may_change_once_the_next_is_asked_for(store: Store) -> None:
    buffer = bytearray(3 << 20)

    def parts() -> Iterator[memoryview]:
        for number in range(9):
            buffer[:] = bytes([number]) * len(buffer)
            yield memoryview(buffer)

    store.write_new("many", parts(), nothing)
    found = store.read("many")
    assert [found[n * (3 << 20)] for n in range(9)] == list(range(9))
    assert [found[(n + 1) * (3 << 20) - 1] for n in range(9)] == list(range(9))


def test_a_stopped_write_leaves_nothing(store: Store) -> None:
    def stop() -> None:
        raise SaveCancelled("stop")

    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(18 << 20))
        stop()

    with pytest.raises(SaveCancelled):
        store.write_new("large", parts(), nothing)
    with pytest.raises(SaveCancelled):
        store.write_new("small", [memoryview(b"x")], stop)
    assert [*store.list("")] == []


def test_a_root_is_replaced_only_over_the_version_that_was_seen(store: Store) -> None:
    store.replace_root("root", b"1", None)
    with pytest.raises(CommitConflict, match="another saver"):
        store.replace_root("root", b"2", None)
    data, version = store.read_root("root")
    assert data == b"1"
    assert version is not None
    store.replace_root("root", b"3", version)
    with pytest.raises(CommitConflict, match="another saver"):
        store.replace_root("root", b"4", version)
    assert store.read_root("root")[0] == b"3"


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_of_many_who_replace_a_root_exactly_one_wins(
    kind: str, request: pytest.FixtureRequest
) -> None:
    store = open_store("memory://race") if kind == "memory" else request.getfixturevalue("s3").store
    store.replace_root("root", b"first", None)
    version = store.read_root("root")[1]
    begin, won, lost = threading.Barrier(6), list[bytes](), list[bytes]()

    def replace(data: bytes) -> None:
        begin.wait()
        try:
            store.replace_root("root", data, version)
            won.append(data)
        except CommitConflict:
            lost.append(data)

    threads = [threading.Thread(target=replace, args=(b"%d" % n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    assert store.read_root("root")[0] == won[0]


def test_listing_names_what_lies_below_a_prefix_and_no_neighbour(store: Store) -> None:
    for name in ("gen-1/a", "gen-1/b/c", "gen-10/a", "root"):
        store.write_new(name, [memoryview(name.encode())], nothing)
    store.sync("gen-1")
    found = {entry.name: entry for entry in store.list("gen-1")}
    assert sorted(found) == ["gen-1/a", "gen-1/b/c"]
    assert found["gen-1/b/c"].size_bytes == len("gen-1/b/c")
    assert len({*store.list("")}) == 4
    store.delete([*found])
    assert sorted(entry.name for entry in store.list("")) == ["gen-10/a", "root"]


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../b", "a//b", "", "a/./b", "a\0b"])
def test_a_name_that_leaves_the_store_is_refused(store: Store, name: str) -> None:
    for call in (
        lambda: store.write_new(name, [memoryview(b"x")], nothing),
        lambda: store.delete([name]),
    ):
        with pytest.raises((BadPath, FileNotFoundError), match="no part may be"):
            call()


def test_a_folder_follows_no_symlink(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(Exception, match="a symbolic link"):
        open_store(tmp_path / "store").read("link")


def test_pieces_are_the_same_bytes_and_hold_no_more_than_a_few_parts() -> None:
    parts = [bytes([n % 251]) * (n * 13 % 977) for n in range(400)]
    pieces = [*joined(map(memoryview, parts), 1000, nothing)]
    assert b"".join(pieces) == b"".join(parts)
    assert {len(piece) for piece in pieces[:-1]} == {1000}
    tracemalloc.start()
    large = bytes(32 << 20)
    for _ in joined([memoryview(large)], 1 << 20, nothing):
        pass
    peak = tracemalloc.get_traced_memory()[1] - len(large)
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape('"pt214-dcp[objects]"')):
        open_store("s3://bucket")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape('"pt214-dcp[fsspec]"')):
        open_store("sftp://host/x")


def test_importing_the_part_imports_no_store() -> None:
    code = "import pt214_dcp, sys; print({'obstore', 'fsspec'} & {*sys.modules} - {*BEFORE})"
    code = "import sys, torch; BEFORE = {*sys.modules}; " + code
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_url_or_option_that_cannot_be_is_refused() -> None:
    with pytest.raises(BadPath, match="no store can be opened"):
        open_store("s3://bucket", StoreOptions(config={"no_such_option": "x"}))
    with pytest.raises(BadPath, match="fsspec can't open it"):
        open_store("nosuchscheme://x")
    with pytest.raises(BadOption, match="timeout_s is 0"):
        StoreOptions(timeout_s=0)
    with pytest.raises(BadOption, match="part_bytes is 1;"):
        StoreOptions(part_bytes=1)


def test_fsspec_says_that_it_cannot_commit_conditionally(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fsspec")
    open_store(f"local://{tmp_path}")
    assert "fsspec can't commit conditionally" in caplog.text
