"""Damaged safetensors files and folders: an error of ours, with file, key and offset."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import safetensors.torch
import torch
from pt214_dcp.interop import huggingface
from pt214_dcp.interop.huggingface import INDEX, read_files
from pt214_dcp.interop.safetensors_header import BITS, check_header
from safetensors.torch import _TYPES  # the oracle of dtypes

Header = dict[str, Any]
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4), "e": torch.zeros(0, 3)}


def write(file: Path, header: Header, data: bytes) -> None:
    told = json.dumps(header).encode()
    file.write_bytes(len(told).to_bytes(8, "little") + told + data)


def damaged(file: Path, change: Callable[[Header], Any]) -> None:
    """A good file whose header was changed."""
    safetensors.torch.save_file(TENSORS, file)
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    write(file, header, data[8 + size :])


def set_(key: str, name: str, value: Any) -> Callable[[Header], Any]:
    return lambda header: header[key].__setitem__(name, value)


LIES: dict[str, tuple[Callable[[Header], Any], str]] = {
    "overlap": (set_("a", "data_offsets", [8, 32]), r"a at offset \d+: overlaps the one"),
    "hole": (set_("a", "data_offsets", [40, 64]), r"a at offset \d+: leaves a hole of 8"),
    "past the end": (
        lambda header: header.update(z={"dtype": "U8", "shape": [9], "data_offsets": [56, 65]}),
        r"z at offset \d+ ends at \d+, the file at \d+",
    ),
    "bytes left": (
        lambda header: (header.pop("a"), header.pop("e")),
        r"tensors end at offset \d+, the file at \d+",
    ),
    "backwards": (set_("a", "data_offsets", [56, 32]), r"a: 24 bytes of F32 \[2, 3\] at data_off"),
    "dtype": (set_("a", "dtype", "F33"), r"a: dtype 'F33' is unknown; known are BOOL"),
    "dtype kind": (set_("a", "dtype", ["F32"]), r"a: dtype \['F32'\] is unknown"),
    "shape": (set_("a", "shape", [2, 4]), r"a: 32 bytes of F32 \[2, 4\] at data_offsets \[32, 56"),
    "huge shape": (set_("a", "shape", [1 << 62, 1 << 62]), r"a: \d+ bytes of F32"),
    "negative": (set_("a", "shape", [-2, -3]), r"a: shape \[-2, -3\]"),
    "bool": (set_("a", "shape", [True, 6]), r"a: shape \[True, 6\]"),
    "three offsets": (set_("a", "data_offsets", [32, 56, 60]), r"a: shape .* at data_offsets"),
    "no dtype": (lambda header: header["a"].pop("dtype"), r"a: the header has no dtype"),
    "no record": (lambda header: header.update(a=3), r"a: the header has no dtype"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_told_by_file_key_and_offset(tmp_path: Path, name: str) -> None:
    change, words = LIES[name]
    damaged(tmp_path / "x.safetensors", change)
    for source in (tmp_path / "x.safetensors", tmp_path):
        with pytest.raises(pt214_dcp.ChunkCorrupt, match=rf"x\.safetensors: {words}"):
            pt214_dcp.convert(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "a header of 0 bytes at offset 8 of a file of 0"),
        (
            b"\xff" * 8 + b"{}",
            r"a header of 18446744073709551615 bytes at offset 8 of a file of 10",
        ),
        (b"\x05" + b"\0" * 7 + b"{}", "a header of 5 bytes at offset 8"),
        (b"\x02" + b"\0" * 7 + b"[]", "the header at offset 8 is a list"),
        (b"\x02" + b"\0" * 7 + b"{[", "the header at offset 8 is damaged"),
        (b"\x02" + b"\0" * 7 + b"\xff\xff", "the header at offset 8 is damaged"),
        (
            b"\x0d" + b"\0" * 7 + b'{"a":1,"a":2}',
            "the header at offset 8 is damaged: key 'a' is there twice",
        ),
        ((60000).to_bytes(8, "little") + b"[" * 60000, "the header at offset 8 is damaged"),
    ],
)
def test_a_header_that_is_none_is_told_by_its_file(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=rf"x\.safetensors: {words}"):
        pt214_dcp.convert(tmp_path, tmp_path / "c")


def test_any_flip_of_a_header_is_ours_or_reads_as_many_bytes(tmp_path: Path) -> None:
    """The format has no checksum: a flip may rename a key, and may not raise what is not ours."""
    file, chance, ours = tmp_path / "x.safetensors", random.Random(0), 0
    safetensors.torch.save_file(TENSORS, file)
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    for turn in range(400):
        data = bytearray(whole)
        data[chance.randrange(8 + size)] ^= 1 << turn % 8
        file.write_bytes(data)
        try:
            assert sum(each.nbytes for _, each in read_files(file)) == 56
        except pt214_dcp.ChunkCorrupt as error:
            assert str(file) in str(error)  # noqa: PT017  # one of two ways to be right
            ours += 1
    assert ours > 200


def test_a_reader_that_leaves_headers_to_the_library_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: the error names neither key nor offset."""
    monkeypatch.setattr(huggingface, "check_header", lambda file: ("a", "b", "e"))
    for name in ("overlap", "dtype", "shape"):
        damaged(tmp_path / "x.safetensors", LIES[name][0])
        with pytest.raises(pt214_dcp.ChunkCorrupt) as caught:
            dict(read_files(tmp_path))
        assert not re.search(
            r"at offset \d+:|unknown; known are|data_offsets \[", str(caught.value)
        )


def test_every_dtype_of_the_library_is_known(tmp_path: Path) -> None:
    for name, dtype in _TYPES.items():
        if name == "F4":
            continue  # two values a byte: shapes differ between torch and the file
        assert isinstance(dtype, torch.dtype)
        assert BITS[name] == dtype.itemsize * 8, name
        tensor = torch.zeros(3, dtype=torch.uint8).repeat(8)[: 3 * dtype.itemsize].view(dtype)
        safetensors.torch.save_file({"w": tensor}, tmp_path / "x.safetensors")
        assert check_header(tmp_path / "x.safetensors") == ("w",)


def folder(path: Path, **listed: Any) -> None:
    path.mkdir()
    safetensors.torch.save_file({"a": torch.ones(2)}, path / "model-1.safetensors")
    safetensors.torch.save_file({"b": torch.ones(3), "c": torch.ones(1)}, path / "m2.safetensors")
    safetensors.torch.save_file({"a": torch.zeros(9)}, path / "other.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": listed}))


def test_an_index_chooses_what_is_read(tmp_path: Path) -> None:
    folder(tmp_path / "f", a="model-1.safetensors", b="m2.safetensors")
    (tmp_path / "f" / "broken.safetensors").write_bytes(b"no")
    found = dict(read_files(tmp_path / "f"))
    assert {key: tuple(each.shape) for key, each in found.items()} == {"a": (2,), "b": (3,)}
    (tmp_path / "f" / "broken.safetensors").unlink()
    (tmp_path / "f" / INDEX).unlink()  # a reader that knows no index would have met this
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=r"a is in model-1\.safetensors too, and no"):
        dict(read_files(tmp_path / "f"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../outside.safetensors", "is outside the folder"),
        ("/etc/passwd", "is outside the folder"),
        ("sub/x.safetensors", "is outside the folder"),
        ("..", "is outside the folder|is not in the folder"),
        ("x\0y", "is outside the folder"),
        (3, "is outside the folder"),
        ("gone.safetensors", "is not in the folder"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: Any, words: str) -> None:
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "outside.safetensors")
    folder(tmp_path / "f", a=name)
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=rf"index\.json: a: file .*({words})"):
        pt214_dcp.convert(tmp_path / "f", tmp_path / "c")


def test_a_listed_key_that_its_file_lacks_is_named(tmp_path: Path) -> None:
    folder(tmp_path / "f", a="model-1.safetensors", z="m2.safetensors")
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=rf"m2\.safetensors: z: {INDEX} lists it here"):
        pt214_dcp.convert(tmp_path / "f", tmp_path / "c")


@pytest.mark.parametrize("text", ["", "[]", "{}", "[" * 9000, '{"weight_map": 3}', "\xff"])
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    folder(tmp_path / "f")
    (tmp_path / "f" / INDEX).write_text(text)
    with pytest.raises(pt214_dcp.ChunkCorrupt, match=r"index\.json: .*weight_map"):
        pt214_dcp.convert(tmp_path / "f", tmp_path / "c")
