"""Importing a part starts nothing and drags nothing heavy in."""

import json
import subprocess
import sys

import pytest

MODULES = ["pt214", "pt214_mps", "pt214_inductor", "pt214_elastic", "pt214_dcp"]
HEAVY = ["triton", "torch._inductor", "torch._dynamo", "matplotlib", "numpy", "tqdm", "sympy"]
PROBE = """
import json, sys, threading
import torch, torch.distributed
before = set(sys.modules)
printed = __import__("io").StringIO()
sys.stdout, real = printed, sys.stdout
import {module}
sys.stdout = real
print(json.dumps({{
    "new": sorted(set(sys.modules) - before),
    "threads": threading.active_count(),
    "cuda": torch.cuda.is_initialized(),
    "printed": printed.getvalue(),
}}))
"""


@pytest.fixture(scope="module", params=MODULES)
def report(request: pytest.FixtureRequest) -> dict[str, object]:
    words = [sys.executable, "-c", PROBE.format(module=request.param)]
    done = subprocess.run(words, text=True, capture_output=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found | {"module": request.param}


def test_import_starts_no_device_and_no_thread_and_prints_nothing(
    report: dict[str, object],
) -> None:
    assert (report["threads"], report["cuda"], report["printed"]) == (1, False, "")


def test_import_brings_no_compiler_and_no_optional_extra(report: dict[str, object]) -> None:
    assert isinstance(report["new"], list)
    assert not {name for name in report["new"] if name in HEAVY}


def test_import_brings_no_other_part(report: dict[str, object]) -> None:
    assert isinstance(report["new"], list)
    roots = {name.partition(".")[0] for name in report["new"]}
    assert roots & set(MODULES) == {report["module"]}


def test_the_meta_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import pt214, pt214.__main__, pt214.doctor"
    subprocess.run([sys.executable, "-c", code], check=True)
