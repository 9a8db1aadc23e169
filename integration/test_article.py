"""Three scripts written for stock torch and for other hardware run after one added line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
ADDED_LINE = "import pt214; pt214.enable()"


def run(
    words: list[str], tmp_path: Path, *, enabled: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a script; without the added line where ``enabled`` is false."""
    script, rest = SCRIPTS / words[0], words[1:]
    text = script.read_text()
    assert ADDED_LINE in text
    copy = tmp_path / script.name
    copy.write_text(text if enabled else text.replace(ADDED_LINE, ""))
    return start([str(copy), *rest], tmp_path)


def start(words: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    env = os.environ | cache | {"PYTHONPATH": str(SCRIPTS), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words], env=env, text=True, capture_output=True, timeout=400, check=False
    )


def test_a_cuda_script_with_max_autotune_and_dynamic_shapes_runs_here(tmp_path: Path) -> None:
    done = run(["vision_compile.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shape (2, 128, 32, 32)\nshape (1, 128, 24, 40)" in done.stdout


def test_a_mac_script_runs_without_mps_and_warns_once(tmp_path: Path) -> None:
    done = run(["mac_latency.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "shape (4, 32, 512)\npositive True" in done.stdout
    assert done.stderr.count("no MPS device") == 1


def test_a_resilient_script_trains_saves_and_restores_under_the_launcher(tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    words = ["-m", "pt214_elastic", "run", "--nproc-per-node", "2"]
    done = start([*words, str(SCRIPTS / "resilient_job.py"), checkpoint], tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} of 2: restored epoch 2" in done.stdout


@pytest.mark.parametrize("name", ["vision_compile.py", "mac_latency.py"])
def test_without_the_added_line_the_same_script_fails_here(name: str, tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has the hardware that the script was written for")
    assert run([name], tmp_path, enabled=False).returncode != 0
