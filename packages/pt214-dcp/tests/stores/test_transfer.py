"""Saves and loads over a real S3 server, straight and through a proxy that misbehaves."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from pt214_dcp.commit import committed, remove_old
from pt214_dcp.errors import (
    AlreadyThere,
    BadOption,
    BadPath,
    ChunkCorrupt,
    CommitConflict,
    NotACheckpoint,
    SaveCancelled,
    SaveFailed,
)
from pt214_dcp.stores import Place, StoreOptions, open_store
from pt214_dcp.stores.objects import Objects
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

LARGE = 12 << 20  # bytes: more than two parts, so that an upload is a multipart one


def options(port: int, **chosen: Any) -> StoreOptions:
    config = {
        "endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b",
        "region": "us-east-1",
    }  # fmt: skip
    return StoreOptions(config=config, **chosen)


def state(seed: int, size_bytes: int = LARGE) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(size_bytes // 4, generator=generator),
        "small": [torch.full((3, n), float(seed), dtype=torch.bfloat16) for n in range(5)],
        "strided": torch.randn(30, 40, generator=generator).t(),
        "step": seed,
    }


def blank() -> dict[str, Any]:
    found = state(0)
    for tensor in (found["weight"], *found["small"], found["strided"]):
        tensor.zero_()
    return found | {"step": -1}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    tensors = [(left[key], right[key]) for key in ("weight", "strided")]
    tensors += zip(left["small"], right["small"], strict=True)
    return left["step"] == right["step"] and all(torch.equal(a, b) for a, b in tensors)


def loaded(place: Place) -> dict[str, Any]:
    found = blank()
    pt214_dcp.load(found, place)
    return found


def names(place: Place) -> set[str]:
    return {entry.name for entry in place.store.list(place.key)}


@pytest.mark.parametrize("background", [False, True])
def test_a_state_comes_back_from_s3_bit_for_bit(s3: Place, background: bool) -> None:
    place = s3 / "run" / "step-1"
    if background:
        saved = state(1)
        handle = pt214_dcp.async_save(saved, place, staging_bytes=8 << 20)
        saved["weight"].zero_()  # training goes on
        handle.wait()
    else:
        pt214_dcp.save(state(1), place)
    assert same(loaded(place), state(1))
    assert pt214_dcp.verify(place).errors == ()


def test_saving_again_replaces_and_leaves_nothing_of_the_old(s3: Place) -> None:
    for seed in (1, 2):
        pt214_dcp.save(state(seed), s3)
    assert same(loaded(s3), state(2))
    generations = {name.partition("/")[0] for name in names(s3) if name.startswith("gen-")}
    assert len(generations) == 1


def test_hashes_are_kept_but_a_base_is_refused(s3: Place, tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    pt214_dcp.save(state(1), s3, hashes=True)
    assert same(loaded(s3), state(1))
    for path, base in ((s3 / "x", s3), (tmp_path / "x", s3), (s3 / "x", tmp_path)):
        with pytest.raises(BadOption, match="leave base out"):
            pt214_dcp.save(state(1), path, base=base)


def test_nothing_there_and_no_overwriting_are_said(s3: Place) -> None:
    with pytest.raises(NotACheckpoint, match="nothing was ever committed"):
        loaded(s3 / "none")
    pt214_dcp.save(state(1), s3)
    with pytest.raises(AlreadyThere, match="overwrite is False"):
        pt214_dcp.save(state(2), s3, overwrite=False)
    assert same(loaded(s3), state(1))


def test_of_two_savers_exactly_one_wins_and_the_other_is_told(s3: Place) -> None:
    pt214_dcp.save(state(1), s3)
    begin = threading.Barrier(2)
    outcomes: dict[int, BaseException | None] = {}

    def save(seed: int) -> None:
        begin.wait()
        outcomes[seed] = pt214_dcp.async_save(state(seed), s3, alone=True).exception()

    threads = [threading.Thread(target=save, args=(seed,)) for seed in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [seed for seed, error in outcomes.items() if error is None]
    (error,) = [error for error in outcomes.values() if error is not None]
    assert isinstance(error, CommitConflict)
    assert "another saver committed here since this save began" in str(error)
    assert s3.store.url in str(error)
    assert same(loaded(s3), state(winner))
    assert len({name.partition("/")[0] for name in names(s3)}) == 2  # one generation and the root


class Unconditional:
    """A saboteur: a store whose root anybody may replace."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def replace_root(self, name: str, data: bytes, expected: str | None) -> Any:
        while True:
            try:
                return self._store.replace_root(name, data, self._store.read_root(name)[1])
            except CommitConflict:  # the other saver came between the two requests: again
                continue


def test_an_unconditional_root_would_let_both_savers_win(s3: Place) -> None:
    broken = Place(Unconditional(s3.store))
    pt214_dcp.save(state(1), broken)
    begun = [
        pt214_dcp.async_save(state(seed), broken, alone=True, staging_bytes=64 << 20)
        for seed in (2, 3)
    ]
    assert [handle.exception() for handle in begun] == [None, None]


def test_a_bucket_that_is_not_there_is_named(s3_port: int) -> None:
    store = open_store("s3://no-such-bucket/x", options(s3_port))
    with pytest.raises((SaveFailed, BadPath), match="s3://no-such-bucket/x"):
        pt214_dcp.save(state(1), Place(store))


def test_a_flipped_bit_is_noticed_with_object_and_key(s3: Place) -> None:
    pt214_dcp.save(state(1), s3)
    (name,) = [name for name in names(s3) if name.endswith(".safetensors")]
    data = bytearray(s3.store.read(name))
    data[len(data) // 2] ^= 1
    s3.store.delete([name])
    s3.store.write_new(name, [memoryview(data)], lambda: None)
    with pytest.raises(ChunkCorrupt, match=r"rank-00000\.safetensors: weight at offset"):
        loaded(s3)
    s3.store.delete([name])
    s3.store.write_new(name, [memoryview(data)[:-9]], lambda: None)
    with pytest.raises(ChunkCorrupt, match=r"expected .* bytes, found"):
        loaded(s3)


def test_a_cancelled_save_leaves_nothing_behind(s3: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    plain = Objects.write_new

    def slow(self: Objects, name: str, parts: Any, check: Any, size_bytes: int | None) -> int:
        def watched() -> Iterator[memoryview]:
            for part in parts:
                reached.set()
                go_on.wait()
                yield part

        return plain(self, name, watched(), check, size_bytes)

    monkeypatch.setattr(Objects, "write_new", slow)
    handle = pt214_dcp.async_save(state(1), s3)
    reached.wait()
    assert handle.cancel()
    go_on.set()
    error = handle.exception()  # held on to, with all that its frames hold
    assert isinstance(error, SaveCancelled)
    assert names(s3) == set()
    pt214_dcp.async_save(state(2), s3).wait(60)  # the slot was handed back


def test_a_checkpointer_keeps_prunes_and_resumes_in_a_bucket(s3: Place) -> None:
    checkpointer = pt214_dcp.Checkpointer(s3 / "run", keep=2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state(step))
        checkpointer.wait()
    assert checkpointer.steps() == [3, 4]
    found = blank()
    assert pt214_dcp.Checkpointer(s3 / "run").restore(found) == 4
    assert same(found, state(4))
    with pytest.raises(BadOption, match="full_every"):
        pt214_dcp.Checkpointer(s3 / "run", full_every=4)


def test_a_dead_savers_leftovers_go_once_they_are_old(s3: Place) -> None:
    dead = "gen-" + "0" * 32
    s3.store.write_new(f"{dead}/rank-00000.safetensors", [memoryview(b"x")], lambda: None)
    pt214_dcp.save(state(1), s3)
    assert any(name.startswith(dead) for name in names(s3))  # it may be alive
    remove_old(s3, None, stale_s=-1.0)
    assert not any(name.startswith(dead) for name in names(s3))
    assert committed(s3) is not None
    assert same(loaded(s3), state(1))


def _sharded(rank: int, port: int, folder: str) -> None:
    place = Place(open_store(f"s3://bucket/{folder}", options(port)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(4000.0).view(50, 80)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    pt214_dcp.save({"w": sharded, "n": 3}, place)
    into: DTensor = distribute_tensor(torch.zeros(50, 80), mesh, [Shard(1)])
    found = {"w": into, "n": 0}
    pt214_dcp.load(found, place)
    assert torch.equal(into.full_tensor(), whole)
    assert found["n"] == 3


def _ranks(folder: str, port: str) -> None:
    spec = spec_from_file_location("ranks", Path(__file__).parent.parent / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.run(Path(folder), 3, _sharded, int(port), Path(folder).name)


def test_three_ranks_save_to_s3_and_load_other_shards(s3_port: int, tmp_path: Path) -> None:
    # Started anew: this process talks to stores already, and their threads do not survive a fork.
    command = [sys.executable, __file__, str(tmp_path), str(s3_port)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stderr


if __name__ == "__main__":
    _ranks(*sys.argv[1:])
