"""Judge the facts: pure, so a test can hand it any machine.

A ``PROBLEM`` makes pt214 or torch slow or broken here and turns the exit status to 1; a ``NOTE`` is
worth knowing and leaves it at 0. Each finding ends with what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from pt214.doctor.facts import Facts
from pt214.parts import PARTS, part

__all__ = ["Finding", "Severity", "Switch", "diagnose"]

TORCH_MIN = (2, 11)
PYTHON_MIN = (3, 11)


class Severity(Enum):
    """How much a finding matters."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know, and the command or edit that settles it."""

    severity: Severity
    subject: str
    text: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Switch:
    """An environment variable that holds a user back, usually set once to debug something."""

    name: str
    bad: tuple[str, ...]  # values that hold back; () means any non-empty value
    why: str


_ON = ("1", "true", "True", "TRUE", "yes", "on")
SWITCHES = (
    Switch("PYTORCH_ENABLE_MPS_FALLBACK", _ON, "operators fall silently back to the CPU"),
    Switch(
        "TORCH_ENABLE_MPS_FALLBACK",
        (),
        "torch does not read this name; PYTORCH_ENABLE_MPS_FALLBACK is meant, and hides "
        "operators that fall back to the CPU",
    ),
    Switch("PYTORCH_MPS_HIGH_WATERMARK_RATIO", ("0.0", "0"), "no memory limit: macOS may hang"),
    Switch("TORCHDYNAMO_DISABLE", _ON, "torch.compile does nothing"),
    Switch("TORCH_COMPILE_DISABLE", _ON, "torch.compile does nothing"),
    Switch("TORCHINDUCTOR_FORCE_DISABLE_CACHES", _ON, "every process compiles everything again"),
    Switch("TRITON_INTERPRET", _ON, "Triton kernels run in Python, thousands of times slower"),
    Switch("CUDA_LAUNCH_BLOCKING", _ON, "each CUDA launch waits for its end"),
    Switch("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "each CUDA allocation calls the driver"),
    Switch("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "each collective is checked by another one"),
    Switch("NCCL_P2P_DISABLE", _ON, "GPUs of one host talk through host memory"),
)


def diagnose(facts: Facts) -> list[Finding]:
    """All findings, problems first, in a fixed order."""
    found = [*_python(facts), *_torch(facts), *_parts(facts), *_compilers(facts), *_switches(facts)]
    return sorted(found, key=lambda finding: finding.severity is not Severity.PROBLEM)


def _numbers(text: str) -> tuple[int, ...]:
    """Leading release numbers: "2.14.1+cu130" is (2, 14, 1)."""
    numbers = []
    for word in text.split("+")[0].split("."):
        if not word.isdigit():
            break
        numbers.append(int(word))
    return tuple(numbers)


def _python(facts: Facts) -> Iterator[Finding]:
    if _numbers(facts.python) < PYTHON_MIN:
        yield Finding(
            Severity.PROBLEM,
            "python",
            f"Python {facts.python}; pt214 needs 3.11 or newer",
            "make the environment anew with a newer Python",
        )


def _torch(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None:
        yield Finding(
            Severity.PROBLEM, "torch", "torch is not installed", "pip install 'torch>=2.14'"
        )
    elif facts.torch_error is not None:
        yield Finding(
            Severity.PROBLEM,
            "torch",
            f"torch {facts.torch} does not import: {facts.torch_error}",
            "pip install --force-reinstall torch",
        )
    elif _numbers(facts.torch) < TORCH_MIN:
        yield Finding(
            Severity.PROBLEM,
            "torch",
            f"torch {facts.torch}; the parts need 2.11 or newer",
            "pip install 'torch>=2.14'",
        )
    elif _numbers(facts.torch) < (2, 14):
        yield Finding(
            Severity.NOTE,
            "torch",
            f"torch {facts.torch}; process groups are re-formed in place from 2.14 on",
            "pip install 'torch>=2.14'",
        )


def _parts(facts: Facts) -> Iterator[Finding]:
    for missing in PARTS:
        if facts.parts.get(missing.name) is None:
            text = f"not installed: {missing.owns}"
            yield Finding(Severity.NOTE, missing.distribution, text, missing.install)
    versions = {version for version in facts.parts.values() if version is not None}
    if len(versions) > 1:
        listed = ", ".join(f"{name} {v}" for name, v in facts.parts.items() if v is not None)
        yield Finding(
            Severity.PROBLEM,
            "parts",
            f"the parts have different versions: {listed}",
            "pip install --upgrade 'pt214[all]'",
        )


def _compilers(facts: Facts) -> Iterator[Finding]:
    if facts.parts.get("inductor") is None or facts.torch is None:
        return
    if facts.cxx is None:
        install = "xcode-select --install" if facts.system == "Darwin" else "apt-get install g++"
        yield Finding(
            Severity.PROBLEM,
            "compiler",
            "no C++ compiler: torch.compile on the CPU, and the first launch of Triton, need one",
            install,
        )
    cuda = any(device.kind == "cuda" and device.count for device in facts.devices)
    if cuda and facts.triton is None:
        yield Finding(
            Severity.PROBLEM,
            "triton",
            f"CUDA is there, triton is not; {part('inductor').distribution} generates with it",
            "pip install triton",
        )


def _switches(facts: Facts) -> Iterator[Finding]:
    for switch in SWITCHES:
        value = facts.environment.get(switch.name, "")
        if value and (not switch.bad or value in switch.bad):
            yield Finding(
                Severity.PROBLEM,
                f"{switch.name}={value}",
                switch.why,
                f"unset {switch.name}",
            )
