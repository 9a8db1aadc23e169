"""Saves and loads over S3 through a proxy that answers wrongly, late, in part or not at all."""

from __future__ import annotations

from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp.errors import SaveFailed, StoreError
from pt214_dcp.stores import Place, StoreOptions, open_store

LARGE = 3 << 20  # float32 values: more than two parts, so that an upload is a multipart one


def state(seed: int) -> dict[str, Any]:
    weight = torch.randn(LARGE, generator=torch.Generator().manual_seed(seed))
    return {"weight": weight, "step": seed}


def loaded(place: Place) -> dict[str, Any]:
    found = {"weight": torch.zeros(LARGE), "step": -1}
    pt214_dcp.load(found, place)
    return found


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left["step"] == right["step"] and torch.equal(left["weight"], right["weight"])


def names(place: Place) -> set[str]:
    return {entry.name for entry in place.store.list(place.key)}


def options(port: int, **chosen: Any) -> StoreOptions:
    config = {
        "endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b",
        "region": "us-east-1",
    }  # fmt: skip
    return StoreOptions(config=config, **chosen)


FAULTS = {
    "500": "500",
    "slow down": "503",
    "dropped before the server": "drop",
    "answer lost": "lose",
    "answer ends midway": "half",
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_request_failing_once_costs_nothing_but_time(
    shaky: tuple[Place, Any], fault: str
) -> None:
    place, faults = shaky
    faults.rule = lambda method, path, count: (
        fault if count == 0 and "list-type" not in path else None
    )
    pt214_dcp.save(state(1), place)
    pt214_dcp.save(state(2), place)
    assert same(loaded(place), state(2))
    assert faults.done >= 10


def test_without_retries_one_fault_would_fail_the_save(faults: tuple[Any, int]) -> None:
    found, port = faults
    store = open_store("s3://bucket/no-retries", options(port, max_retries=0))
    found.rule = lambda method, path, count: "500" if method == "PUT" and count == 0 else None
    with pytest.raises(SaveFailed, match="StoreError"):
        pt214_dcp.save(state(1), Place(store))


def test_an_answer_that_comes_too_late_may_still_commit(shaky: tuple[Place, Any]) -> None:
    place, faults = shaky
    pt214_dcp.save(state(1), place)
    before = names(place)
    faults.rule = lambda method, path, count: (
        "503" if method == "PUT" and "COMMIT.json" in path else None
    )
    with pytest.raises(SaveFailed):
        pt214_dcp.save(state(2), place)
    assert len(names(place) - before) == 4  # data, manifest, table, index: the root may name them
    assert before <= names(place)


def test_slow_answers_are_given_up_and_asked_for_again(shaky: tuple[Place, Any]) -> None:
    place, faults = shaky
    pt214_dcp.save(state(1), place)
    faults.rule = lambda method, path, count: "delay" if method == "GET" and count == 0 else None
    assert same(loaded(place), state(1))
    assert faults.done >= 3


@pytest.mark.parametrize("stage", ["uploadId", "manifest", "index", "COMMIT.json"])
def test_a_store_that_stays_down_fails_the_save_and_keeps_the_old(
    faults: tuple[Any, int], shaky: tuple[Place, Any], stage: str
) -> None:
    place, found = shaky
    pt214_dcp.save(state(1), place)
    found.rule = lambda method, path, count: "503" if method == "PUT" and stage in path else None
    with pytest.raises(SaveFailed, match="StoreError") as caught:
        pt214_dcp.save(state(2), place)
    assert f"{place.store.url}/" in str(caught.value)
    assert "503" in str(caught.value)
    found.rule = lambda method, path, count: None
    assert same(loaded(place), state(1))


def test_a_load_from_a_store_that_stays_down_names_the_object(shaky: tuple[Place, Any]) -> None:
    place, faults = shaky
    pt214_dcp.save(state(1), place)
    faults.rule = lambda method, path, count: "drop" if "safetensors" in path else None
    with pytest.raises(StoreError, match=r"rank-00000\.safetensors: can't"):
        loaded(place)
