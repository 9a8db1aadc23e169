"""Events in a file and in a callback; a callback that raises ends the job and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from pt214_elastic import launch
from pt214_elastic.events import Event, Kind
from pt214_elastic.journal import Journal
from pt214_elastic.launch import Launcher

# Speaks the protocol without torch: one note, then it would live for minutes.
NOTER = """
import time
from pt214_elastic.client import Client
from pt214_elastic.options import read_place
client = Client(read_place(), on_fault=lambda epoch: None)
client.send("note", kind="custom", step=None, epoch=0, data={"name": "hello"})
time.sleep(600)
"""


class Careless(Exception):
    """The mistake of a callback."""


def test_events_are_written_before_the_callback_sees_them(tmp_path: Path) -> None:
    path, seen = tmp_path / "events.jsonl", []
    journal = Journal(lambda _: seen.append(path.read_text()), path)
    with journal.opened():
        journal.note(Event(Kind.COMMIT, step=3))
    assert json.loads(seen[0])["step"] == 3


def test_a_callback_that_raised_is_not_called_again() -> None:
    calls: list[Event] = []

    def callback(event: Event) -> None:
        calls.append(event)
        raise Careless("once")

    journal = Journal(callback, None)
    journal.note(Event(Kind.COMMIT))
    journal.note(Event(Kind.COMMIT))
    assert len(calls) == 1
    assert isinstance(journal.failure, Careless)


# ValueError too: the protocol raises it for a malformed message, and must not take this one for it.
@pytest.mark.parametrize("mistake", [Careless, ValueError])
def test_a_callback_that_raises_ends_the_job_and_surfaces(
    tmp_path: Path, mistake: type[Exception]
) -> None:
    pids: list[int] = []

    def callback(event: Event) -> None:
        if event.kind is Kind.SPAWN:
            pids.append(event.data["pid"])
        if event.data.get("name") == "hello":
            raise mistake("in the callback")

    path = tmp_path / "events.jsonl"
    job = Launcher([sys.executable, "-c", NOTER], nproc=2, on_event=callback, events_path=path)
    with pytest.raises(mistake, match="in the callback"):
        job.run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    exits = {row["data"]["pid"]: row["data"]["how"] for row in rows if row["kind"] == "exit"}
    assert exits == dict.fromkeys(pids, "SIGTERM")  # waited for: no orphan, no replacement
    assert rows[-1]["kind"] == "end"
    assert rows[-1]["data"]["reason"] == f"on_event raised {mistake.__name__}: in the callback"
    assert rows[-1]["data"]["rejected"] == {}


def test_a_callback_called_bare_would_be_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saboteur: the exception goes through the protocol, which blames the worker's message."""

    class Bare(Journal):
        def note(self, event: Event) -> None:
            assert self._on_event is not None
            self._on_event(event)

    monkeypatch.setattr(launch, "Journal", Bare)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_callback_that_raises_ends_the_job_and_surfaces(tmp_path, ValueError)
