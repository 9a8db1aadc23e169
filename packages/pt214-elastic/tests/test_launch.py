"""The launcher without torch: return codes, orphans, signals, arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pt214_elastic import __main__ as command
from pt214_elastic.errors import OptionError
from pt214_elastic.events import Event, Kind
from pt214_elastic.launch import Launcher

SCRIPTS = Path(__file__).parent / "scripts"
SLEEPER = "import time; time.sleep(600)"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone_within(pids: list[int], limit_s: float) -> bool:
    deadline_s = time.monotonic() + limit_s
    while any(map(alive, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def launched(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher in a process of its own, with two sleeping workers; their pids."""
    code = (
        "import sys; from pt214_elastic.launch import Launcher\n"
        f"job = Launcher([sys.executable, '-c', {SLEEPER!r}], nproc=2,\n"
        "    on_event=lambda e: e.kind == 'spawn' and print(e.data['pid'], flush=True))\n"
        "sys.exit(job.run())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(process.stdout.readline()) for _ in range(2)]


def test_the_launcher_does_not_import_torch() -> None:
    code = "import sys, pt214_elastic.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_members_ending_well_is_zero() -> None:
    assert Launcher([sys.executable, "-c", "pass"], nproc=3).run() == 0


def test_a_foreign_script_that_fails_gives_its_code() -> None:
    assert Launcher([sys.executable, "-c", "raise SystemExit(7)"], nproc=2).run() == 7


def test_stop_from_another_thread_ends_all() -> None:
    events: list[Event] = []
    job = Launcher([sys.executable, "-c", SLEEPER], nproc=2, on_event=events.append)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(job.run()))
    thread.start()
    while len(job.workers()) < 2:
        assert thread.is_alive()
    pids = list(job.workers().values())
    job.stop()
    thread.join(timeout=20)
    assert codes == [128 + signal.SIGTERM]
    assert not any(map(alive, pids))
    assert [event.kind for event in events][-1] is Kind.END


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and PR_SET_PDEATHSIG")
def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    process, pids = launched(tmp_path)
    assert all(map(alive, pids))
    process.kill()
    process.communicate()
    assert gone_within(pids, 2.0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_the_job_with_their_code(tmp_path: Path, number: int) -> None:
    process, pids = launched(tmp_path)
    os.kill(process.pid, number)
    process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert not any(map(alive, pids))


def test_plain_ddp_runs_unchanged(tmp_path: Path) -> None:
    flags = ["run", "--nproc-per-node", "2", "--log-dir", str(tmp_path)]
    assert command.main([*flags, str(SCRIPTS / "plain_ddp.py")]) == 0
    text = "".join(sorted(path.read_text() for path in tmp_path.glob("*.out")))
    assert text == "rank 0 of 2 sum 1.0\nrank 1 of 2 sum 1.0\n"


def test_the_same_error_on_every_rank_ends_the_job_with_its_message(tmp_path: Path) -> None:
    events: list[Event] = []
    cmd = [sys.executable, str(SCRIPTS / "all_fail.py")]
    assert Launcher(cmd, nproc=2, log_dir=tmp_path, on_event=events.append).run() == 1
    assert "ValueError: the same mistake everywhere" in events[-1].data["reason"]


# Speaks the protocol without torch. Member 1 dies; its replacement joins at once, or never.
PATIENT = """
import os, signal, sys, time
from pt214_elastic.client import Client
from pt214_elastic.options import read_place
client = Client(read_place(), on_fault=lambda epoch: None)
if client.member == 2 and sys.argv[1] == "never":
    time.sleep(600)
client.send("join", handle="h", on_fault=None, min_ranks=None)
record = client.wait_record()
if client.member == 1:
    os.kill(os.getpid(), signal.SIGKILL)
standing = dict(handle="h", committed=0, filled=True, complete=False, hold_world=0, hold_s=0.0)
if client.member == 0:
    client.wait_broken(record.epoch, 60)
    client.send("report", epoch=record.epoch, done=False, **standing)
    record = client.wait_record()  # raises JobFailed past the limit
    client.send("note", kind="custom", step=None, epoch=record.epoch,
                data={"name": "went on", "world": len(record.members)})
client.send("report", epoch=record.epoch, done=True, **standing)
client.wait_record()
"""


def run_below_min_ranks(folder: Path, comes: str, patience_s: float) -> tuple[int, list[Event]]:
    events: list[Event] = []
    job = Launcher(
        [sys.executable, "-c", PATIENT, comes],
        nproc=2,
        min_ranks=2,
        patience_s=patience_s,
        log_dir=folder,
        on_event=events.append,
    )
    return job.run(), events


def test_below_min_ranks_the_job_waits_for_a_joiner_and_goes_on(tmp_path: Path) -> None:
    code, events = run_below_min_ranks(tmp_path, "at once", 60.0)
    assert [event.data["world"] for event in events if event.data.get("name") == "went on"] == [2]
    assert code == 0


def test_below_min_ranks_the_job_ends_past_the_limit(tmp_path: Path) -> None:
    code, events = run_below_min_ranks(tmp_path, "never", 0.5)
    wanted = "world_size=1 is below min_ranks=2 and nobody came within 0.5 s to raise it"
    assert code == 1
    assert wanted in events[-1].data["reason"]
    assert f"JobFailed: {wanted}" in (tmp_path / "member-0.err").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nproc": 0}, "nproc=0: expected at least 1"),
        ({"min_ranks": 3}, "min_ranks=3: expected 1 to nproc=2"),
        ({"max_restarts": -1}, "max_restarts=-1: expected 0 or more"),
        ({"on_fault": "pray"}, "on_fault='pray': expected one of 'rejoin'"),
        ({"cmd": []}, "cmd is empty"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"cmd": ["true"], "nproc": 2, **change}
    with pytest.raises(OptionError, match=message):
        Launcher(**arguments)  # type: ignore[arg-type]
