"""Frames: what is authentic passes, everything else is refused."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pt214_elastic import wire
from pt214_elastic.errors import WireError

KEY = bytes(32)


def pair(key: bytes = KEY, other: bytes = KEY) -> tuple[wire.Channel, wire.Channel]:
    down, up = wire.greeting(), wire.greeting()
    return (
        wire.Channel(key, down, up, is_coordinator=True),
        wire.Channel(other, down, up, is_coordinator=False),
    )


@given(st.lists(st.binary(max_size=200), max_size=6), st.integers(1, 50))
def test_messages_arrive_whole_and_in_order_however_bytes_are_cut(
    blobs: list[bytes], cut: int
) -> None:
    one, two = pair()
    stream = b"".join(one.seal({"op": "x", "n": n}, blob) for n, blob in enumerate(blobs))
    got = [m for at in range(0, len(stream), cut) for m in two.feed(stream[at : at + cut])]
    assert [(header["n"], blob) for header, blob in got] == list(enumerate(blobs))


def test_a_wrong_key_is_refused() -> None:
    one, two = pair(KEY, bytes([1]) * 32)
    with pytest.raises(WireError, match="not authentic"):
        two.feed(one.seal({"op": "x"}))


def test_a_replayed_frame_is_refused() -> None:
    one, two = pair()
    frame = one.seal({"op": "x"})
    assert two.feed(frame)
    with pytest.raises(WireError, match="not authentic"):
        two.feed(frame)


def test_a_frame_of_another_connection_is_refused() -> None:
    frame = pair()[0].seal({"op": "x"})
    with pytest.raises(WireError, match="not authentic"):
        pair()[1].feed(frame)


def test_a_frame_sent_back_to_its_writer_is_refused() -> None:
    one, _ = pair()
    with pytest.raises(WireError, match="not authentic"):
        one.feed(one.seal({"op": "x"}))


@given(st.integers(0, 10_000))
def test_a_flipped_bit_is_refused(at: int) -> None:
    one, two = pair()
    frame = bytearray(one.seal({"op": "x"}, b"blob"))
    at = 4 + at % (len(frame) - 4)  # the length is checked by its own limit
    frame[at] ^= 1
    with pytest.raises(WireError):
        two.feed(bytes(frame))


def test_a_frame_too_long_is_refused_before_it_arrives() -> None:
    _, two = pair()
    with pytest.raises(WireError, match="are allowed"):
        two.feed(struct.pack(">I", wire.MAX_FRAME_BYTES + 1))


def test_a_greeting_of_something_else_is_refused() -> None:
    with pytest.raises(WireError, match="does not start"):
        wire.Channel(KEY, wire.greeting(), os.urandom(24), is_coordinator=True)


def test_a_short_key_is_refused() -> None:
    with pytest.raises(WireError, match="at least 16"):
        wire.Channel(b"short", wire.greeting(), wire.greeting(), is_coordinator=True)


def test_a_header_that_is_no_message_is_refused() -> None:
    one, two = pair()
    with pytest.raises(WireError, match="'op'"):
        two.feed(one.seal({"no": "op"}))


def test_a_message_too_long_is_refused_by_its_writer() -> None:
    with pytest.raises(WireError, match="fit"):
        pair()[0].seal({"op": "x"}, bytes(wire.MAX_FRAME_BYTES))
