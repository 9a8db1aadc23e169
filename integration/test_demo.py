"""The main job as a user runs it: healed from a kill, stopped by Ctrl-C, killed, out of disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LIMIT_S = 400
# Without a compiler the ranks start soonest; the first test alone compiles.
PLAIN = {"CXX": "", "PATH": str(Path(sys.executable).parent)}


def start(out: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pt214", "demo", "--out", str(out), *words],
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ranks_of(out: Path) -> list[int]:
    """Processes of this very run, told by the plan's path on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue
        if folder.name.isdigit() and any(str(out / "work").encode() in word for word in words):
            found.append(int(folder.name))
    return found


def until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.05)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A demo whose ranks have begun."""
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("processes are found through /proc")
    job = start(tmp_path, "--ranks", "2", "--steps", "5000", "--fault", "none", env=PLAIN)
    logs = tmp_path / "logs"
    try:
        until(lambda: any(logs.glob("member-*")), 240, "ranks begin")
        yield job, tmp_path
    finally:
        job.kill()
        job.communicate()


def test_a_killed_rank_is_healed_and_the_checkpoint_resumes_on_two(tmp_path: Path) -> None:
    job = start(tmp_path, "--ranks", "3", "--steps", "60")
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, out + err
    facts = json.loads((tmp_path / "demo.json").read_text())
    assert facts["world_sizes"] == [3, 2, 3]
    assert facts["pids_kept"] is True
    assert facts["steps_committed"] == 60
    assert facts["recovery_s"] > 0
    assert facts["loss_resumed"] == pytest.approx(facts["loss_saved"], rel=1e-5)
    assert facts["losses"][-1] < facts["losses"][0]
    assert all(save["size_bytes"] > 0 for save in facts["checkpoints"])
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert ranks_of(tmp_path) == []


def test_ctrl_c_ends_with_130_a_message_and_no_orphan(
    running: tuple[subprocess.Popen[str], Path],
) -> None:
    job, out = running
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 130
    assert "stopped; no process is left behind" in err
    assert "Traceback" not in err
    until(lambda: not ranks_of(out), 30, "ranks end")


def test_a_killed_launcher_leaves_no_orphan(running: tuple[subprocess.Popen[str], Path]) -> None:
    job, out = running
    assert ranks_of(out)
    job.kill()
    until(lambda: not ranks_of(out), 30, "ranks end")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_is_told_in_words(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(tmp_path)], check=False
    )
    if mounted.returncode:
        pytest.skip("this root may not mount a tmpfs")
    try:
        job = start(tmp_path, "--ranks", "2", "--steps", "20", "--fault", "none", env=PLAIN)
        out, err = job.communicate(timeout=LIMIT_S)
        assert job.returncode != 0
        assert "No space left on device" in err, out + err
        assert "Traceback" not in err
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_stopped_rank_is_replaced_too(tmp_path: Path) -> None:
    words = ("--ranks", "3", "--steps", "40", "--fault", "stop")
    job = start(tmp_path, *words, env=PLAIN)
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, out + err
    assert json.loads((tmp_path / "demo.json").read_text())["world_sizes"] == [3, 2, 3]


def test_one_rank_trains_alone(tmp_path: Path) -> None:
    job = start(tmp_path, "--ranks", "1", "--steps", "10", env=PLAIN)
    out, err = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 0, out + err
    assert json.loads((tmp_path / "demo.json").read_text())["world_sizes"] == [1]
