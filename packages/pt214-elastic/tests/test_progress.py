"""The page between a worker and its launcher, written on one side and read on the other."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pt214_elastic.hang import Where
from pt214_elastic.progress import Page, Progress


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path / "page")


def test_a_worker_that_has_not_written_is_not_seen(page: Page) -> None:
    assert page.view() is None


def test_where_a_worker_stands_is_seen(page: Page) -> None:
    counts = iter([100, 103, 104])
    progress = Progress(page.path, lambda: next(counts))
    seen = []

    def look() -> None:
        view = page.view()
        assert view is not None
        seen.append((view.where, view.position))

    look()
    progress.enter(7)
    look()
    progress.beat()
    look()
    with progress.at_boundary():
        look()
    look()
    progress.leave()
    look()
    assert seen == [
        (Where.OUTSIDE, (0, 0)),
        (Where.INSIDE, (7, 0)),
        (Where.INSIDE, (7, 3)),
        (Where.BOUNDARY, (7, 3)),
        (Where.INSIDE, (7, 3)),
        (Where.OUTSIDE, (7, 3)),
    ]


def test_each_entering_and_leaving_is_a_move(page: Page) -> None:
    progress = Progress(page.path, lambda: 0)
    moves = []
    for enters in (True, False, True):
        progress.enter(1) if enters else progress.leave()
        view = page.view()
        assert view is not None
        moves.append(view.moves)
    assert moves == [2, 3, 4]


def test_the_pulse_counts_while_the_main_thread_blocks(page: Page) -> None:
    count = [0]
    progress = Progress(page.path, lambda: count[0])
    progress.enter(1)
    progress.start_pulse()
    count[0] = 5
    deadline_s = time.monotonic() + 10
    while (view := page.view()) is None or view.position != (1, 5):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_another_processs_writing_is_seen(page: Page) -> None:
    code = (
        f"from pt214_elastic.progress import Progress\nProgress({page.path!r}, lambda: 0).enter(3)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    view = page.view()
    assert view is not None
    assert (view.where, view.position) == (Where.INSIDE, (3, 0))  # a dead worker's last word


def test_a_page_that_cannot_be_made_only_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        page = Page(tmp_path / "missing" / "page")
    assert "hangs of its worker are not seen" in caplog.text
    assert page.path == ""
    assert page.view() is None


def test_a_worker_without_a_page_writes_into_its_own_memory() -> None:
    Progress("", lambda: 0).enter(1)
