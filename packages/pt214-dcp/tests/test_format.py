"""The format page is enough to write a reader: this one uses nothing of ours.

It takes the steps of ``docs/dcp-format.md`` one by one, with msgpack, hashlib and struct.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pt214_dcp
import pytest
import torch
import xxhash

Tensors = dict[str, torch.Tensor]
PAGE = Path(__file__).parents[3] / "docs" / "dcp-format.md"


def blake2b(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read_by_the_page(path: Path) -> tuple[Any, Tensors]:
    """The tree and the tensors of a checkpoint of one rank."""
    line = (path / "COMMIT.json").read_bytes()
    root = json.loads(line)
    body = root["body"]
    assert root["blake2b"] == blake2b(line[line.index(b'"body":') + 7 : -2])
    folder = path / body["generation"]
    data = (folder / "table-00000").read_bytes()
    assert body["tables"] == [[len(data), blake2b(data)]]
    table = msgspec.msgpack.decode(data)
    page = (folder / "index").read_bytes()
    assert body["pages"] == [blake2b(page)]
    manifest_bytes, data_bytes, _, digest = struct.unpack("<QQI16s", page)
    data = (folder / "rank-00000.manifest").read_bytes()
    assert (len(data), blake2b(data)) == (manifest_bytes, digest.hex())
    manifest = msgspec.msgpack.decode(data)
    content = (folder / "rank-00000.safetensors").read_bytes()
    assert len(content) == data_bytes
    return table["tree"], dict(chunks(table, manifest, content))


def chunks(table: Any, manifest: Any, content: bytes) -> Any:
    at, block = manifest["header"][0], 0
    checksums, sizes = array("Q", manifest["checksums"]), array("q", manifest["chunk_size"])
    for tensor, ndim in zip(array("I", manifest["chunk_tensor"]), manifest["chunk_ndim"]):  # noqa: B905
        size, sizes = list(sizes[:ndim]), sizes[ndim:]
        dtype = getattr(torch, table["dtypes"][array("H", table["dtype"])[tensor]])
        length = dtype.itemsize
        for n in size:
            length *= n
        for begin in range(at, at + length, manifest["block_bytes"]):
            end = min(begin + manifest["block_bytes"], at + length)
            assert xxhash.xxh3_64_intdigest(content[begin:end]) == checksums[block]
            block += 1
        flat = torch.frombuffer(bytearray(content[at : at + length]), dtype=dtype)
        yield table["keys"][tensor], flat.view(size)
        at += length
    assert (block, at) == (len(checksums), len(content))


def test_a_reader_written_from_the_page_reads_what_was_saved(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a/b": {"[0]": torch.randn(700_000)}, "step": 7, "n": [None, "x"]}
    state["w"] = torch.arange(6, dtype=torch.int16).view(2, 3)
    pt214_dcp.save(state, tmp_path)
    tree, tensors = read_by_the_page(tmp_path)
    assert tensors.keys() == {"a~1b/~20]", "w"}
    assert torch.equal(tensors["w"], state["w"])
    assert torch.equal(tensors["a~1b/~20]"], state["a/b"]["[0]"])
    assert ["step", 7] in tree["dict"]


@pytest.mark.parametrize("name", ["COMMIT.json", "index", "rank-00000.manifest", "table-00000"])
def test_that_reader_notices_a_change(tmp_path: Path, name: str) -> None:
    pt214_dcp.save({"w": torch.randn(5)}, tmp_path)
    (file,) = tmp_path.rglob(name)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises((AssertionError, ValueError, KeyError)):
        read_by_the_page(tmp_path)


def hex_of(section: str) -> bytes:
    """The bytes that a section of the page shows: groups at the begin of a line, before a note."""
    found = ""
    for line in section.splitlines():
        groups = re.match(r"(?:[0-9a-f]{2,4}(?: (?=[0-9a-f]{2,4}(?:\s|$))|(?=\s|$)))+", line)
        if groups and re.fullmatch(r"([0-9a-f]{4} )*[0-9a-f]{2,4}", groups[0].strip()):
            found += groups[0]
    return bytes.fromhex(found)


@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside this package")
def test_the_bytes_of_the_page_are_those_that_a_save_writes(tmp_path: Path) -> None:
    pt214_dcp.save({"step": 7, "w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, tmp_path)
    sections = dict(
        re.findall(r"^### (\S+)\n(.*?)(?=^### |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    )
    for name in ("table-00000", "index", "rank-00000.manifest"):
        (file,) = tmp_path.glob(f"gen-*/{name}")
        assert hex_of(sections[name]) == file.read_bytes(), name
