from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the demo's text needs torch, which the meta does not bring")
from pt214.demo.options import DemoError
from pt214.demo.text import CONTEXT, gather, read


def test_the_default_is_real_text_of_the_standard_library() -> None:
    text = gather(None)
    assert b"def " in text
    assert len(text) > 1_000_000


def test_text_shorter_than_a_context_is_refused_with_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(b"x" * CONTEXT)
    with pytest.raises(DemoError, match=rf"short.txt: {CONTEXT} bytes of text; at least \d+"):
        gather(tmp_path / "short.txt")


def test_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="No such file or directory; name a file or folder"):
        gather(tmp_path / "nowhere")


def test_a_folder_gives_its_text_files_in_order_of_names(tmp_path: Path) -> None:
    for name, letter in (("b.txt", b"b"), ("a.md", b"a"), ("c.bin", b"c")):
        (tmp_path / name).write_bytes(letter * 2000)
    assert gather(tmp_path) == b"a" * 2000 + b"\n" + b"b" * 2000


def test_the_target_of_each_byte_is_the_next_and_the_splits_do_not_overlap(tmp_path: Path) -> None:
    text = bytes(range(256)) * 20
    (tmp_path / "text").write_bytes(text)
    train, held_out = read(tmp_path / "text")
    x, y = train[3]
    assert x[1:].tolist() == y[:-1].tolist()
    assert len(train) > len(held_out) > 0
    last, _ = train[len(train) - 1]
    assert len(last) == CONTEXT
