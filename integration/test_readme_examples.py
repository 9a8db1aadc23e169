"""Every ```python block of the READMEs runs as printed, in an empty folder and a fresh process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = sorted([ROOT / "README.md", *ROOT.glob("packages/*/README.md"), *ROOT.glob("docs/*.md")])
# Libraries that a block needs and the parts do not: run where they are. Nothing else is left out.
NEEDS = {"docs/dcp-recipes.md#2": "lightning", "docs/dcp-recipes.md#4": "torchtitan"}


def blocks(path: Path) -> list[str]:
    """Texts of the Python blocks of a Markdown file."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)


EXAMPLES = {
    f"{path.relative_to(ROOT)}#{at}": text
    for path in READMES
    for at, text in enumerate(blocks(path))
}


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", text]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_a_readme_runs_as_printed(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason="its recipe runs under nox -s soak")
    done = run(EXAMPLES[name], tmp_path)
    assert done.returncode == 0, done.stderr


def test_each_package_shows_its_job_on_a_few_lines() -> None:
    packages = sorted(path.name for path in (ROOT / "packages").iterdir() if path.is_dir())
    for package in packages:
        text = EXAMPLES[f"packages/{package}/README.md#0"]
        assert len(text.strip().splitlines()) <= 15, package


def test_a_block_with_a_wrong_name_fails(tmp_path: Path) -> None:
    text = EXAMPLES["packages/pt214-dcp/README.md#0"].replace("Checkpointer", "Checkpointers")
    assert run(text, tmp_path).returncode != 0
