"""The main job as a user runs it: healed from a kill, stopped by Ctrl-C, killed, out of disk."""

import contextlib
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


def descendants(pid: int) -> set[int]:
    """Every living process below ``pid``: ranks are forked, so no command line names them."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended meanwhile
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    below: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *below}} - below:
        below |= more
    return below


def living(pids: set[int]) -> set[int]:
    """Those of ``pids`` that have neither ended nor become a zombie."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            found |= {pid} if state != "Z" else set()
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
    for save in facts["checkpoints"]:
        root_file = tmp_path / "checkpoints" / f"step-{save['step']:06}" / "COMMIT.json"
        root = json.loads(root_file.read_text())["body"]
        assert (save["world_size"], save["size_bytes"]) == (root["world_size"], root["size_bytes"])
    assert {save["world_size"] for save in facts["checkpoints"]} == {2, 3}
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_with_130_a_message_and_no_orphan(
    running: tuple[subprocess.Popen[str], Path],
) -> None:
    job, _ = running
    ranks = descendants(job.pid)
    assert len(ranks) >= 2
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 130
    assert "stopped; no process is left behind" in err
    assert "Traceback" not in err
    until(lambda: not living(ranks), 30, "ranks end")


def test_a_killed_launcher_leaves_no_orphan(running: tuple[subprocess.Popen[str], Path]) -> None:
    job, _ = running
    ranks = descendants(job.pid)
    assert len(ranks) >= 2
    job.kill()
    until(lambda: not living(ranks), 30, "ranks end")


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
        assert max(map(len, err.splitlines())) < 600, err
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
