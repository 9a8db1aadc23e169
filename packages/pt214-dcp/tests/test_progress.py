"""What a caller is told of work in the background: bytes done, and the errors of earlier saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
from pt214_dcp import commit, saver

Save = Callable[..., Any]
MIB = 1 << 20


def state(number: float = 1.0) -> dict[str, Any]:
    return {f"w{at}": torch.full((MIB,), number) for at in range(6)}


def checkpointer_save(given: dict[str, Any], path: Path, **options: Any) -> Any:
    return pt214_dcp.Checkpointer(path, **options).save(1, given)


SAVES = [pt214_dcp.save, pt214_dcp.async_save, pt214_dcp.save_state_dict, checkpointer_save]


@pytest.fixture(params=SAVES, ids=lambda call: call.__name__)
def save(request: pytest.FixtureRequest) -> Save:
    return request.param  # type: ignore[no-any-return]


def test_every_way_to_save_tells_how_far_it_is(tmp_path: Path, save: Save) -> None:
    seen: list[tuple[int, int]] = []
    save(state(), tmp_path, progress=lambda done, total: seen.append((done, total))).wait()
    assert seen[-1] == (24 * MIB, 24 * MIB)
    assert seen == sorted(seen)


def test_every_way_to_save_shows_a_meter(
    tmp_path: Path, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    save(state(), tmp_path, progress=True).wait()
    assert "save" in capsys.readouterr().err


def raising(done: int, total: int) -> None:
    raise KeyError(f"{done} of {total}")


def test_a_progress_that_raises_is_dropped_and_the_save_goes_on(
    tmp_path: Path, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    save(state(), tmp_path / "c", progress=raising).wait()
    told = [record for record in caplog.records if "progress raised" in record.message]
    assert len(told) == 1
    found = state(0.0)
    path = tmp_path / "c"
    steps = path / "step-0000000001"
    pt214_dcp.load(found, steps if steps.exists() else path, progress=raising)
    assert all(bool((tensor == 1).all()) for tensor in found.values())


def shown_rank(rank: int, folder: str) -> None:
    from pt214_dcp import progress

    bars: list[str] = []
    real = progress._Bar.tell

    def tell(self: Any, done: int, total: int) -> None:
        bars.append(self._title)
        real(self, done, total)

    meter: Any = progress._Bar
    meter.tell = tell
    pt214_dcp.save(state(), folder, progress=True)
    pt214_dcp.async_save(state(), folder, progress=True).wait()
    pt214_dcp.load(state(0.0), folder, progress=True)
    assert bool(bars) == (rank == 0)


def test_rank_0_alone_shows_a_meter(run_ranks: Callable[..., None], tmp_path: Path) -> None:
    run_ranks(2, shown_rank, str(tmp_path / "c"))


def lose(path: Path) -> Any:
    """A save that fails in the background, and that nobody asks."""
    path.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(commit, "commit", lambda *_: (_ for _ in ()).throw(OSError(5, "rot")))
        handle = pt214_dcp.async_save(state(), path)
        handle._ended.wait(60)
    return handle


def test_a_forgotten_error_is_raised_by_the_next_save(tmp_path: Path, save: Save) -> None:
    lose(tmp_path / "lost")
    with pytest.raises(pt214_dcp.SaveFailed, match="rot") as caught:
        save(state(2.0), tmp_path / "next").wait()
    assert any("earlier save to" in note for note in caught.value.__notes__)
    assert not list((tmp_path / "next").rglob("COMMIT.json"))
    save(state(2.0), tmp_path / "next").wait()  # it was told: once is enough


def test_an_error_that_was_told_is_not_raised_again(tmp_path: Path) -> None:
    handle = lose(tmp_path / "lost")
    assert isinstance(handle.exception(), pt214_dcp.SaveFailed)
    pt214_dcp.save(state(), tmp_path / "next")


def test_savers_that_forget_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "_forgotten", lambda: None)
    handle = lose(tmp_path / "lost")
    pt214_dcp.save(state(2.0), tmp_path / "next")  # and so the test above, which wants it, fails
    handle.exception()


def test_the_exit_tells_what_nobody_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    handle = lose(tmp_path / "lost")
    with caplog.at_level(logging.ERROR, "pt214_dcp.saver"):
        saver._report_unseen()
    assert f"the save to {tmp_path / 'lost'} was lost" in caplog.text
    handle.exception()
