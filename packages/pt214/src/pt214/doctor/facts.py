"""Look at this machine: versions, devices, compilers, environment. No judgement here."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from pt214.parts import PARTS

__all__ = ["Device", "Facts", "collect"]


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of device, as torch sees it."""

    kind: str  # "cpu", "cuda", "mps"
    count: int
    detail: str  # a name, or why there is none


@dataclass(frozen=True, slots=True)
class Facts:
    """All that ``diagnose`` judges; a test builds it by hand."""

    python: str
    system: str  # platform.system(): "Linux", "Darwin", "Windows"
    machine: str  # platform.machine(): "x86_64", "arm64"
    torch: str | None
    torch_error: str | None  # torch is installed but does not import
    triton: str | None
    cxx: str | None  # path of the C++ compiler that inductor would call on the CPU
    parts: dict[str, str | None] = field(default_factory=dict)  # name -> version; None: missing
    devices: tuple[Device, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def collect() -> Facts:
    """The facts of this machine and environment. Imports torch; makes no tensor on a device."""
    devices, error = _devices()
    return Facts(
        python=platform.python_version(),
        system=platform.system(),
        machine=platform.machine(),
        torch=_version("torch"),
        torch_error=error,
        triton=_version("triton"),
        cxx=_cxx(),
        parts={part.name: _part_version(part.module, part.distribution) for part in PARTS},
        devices=devices,
        environment=dict(os.environ),
    )


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _part_version(module: str, distribution: str) -> str | None:
    if find_spec(module) is None:
        return None
    return _version(distribution) or "not installed, but on sys.path"


def _cxx() -> str | None:
    named = os.environ.get("CXX")
    for candidate in (named, "g++", "clang++", "c++"):
        if candidate and (found := shutil.which(candidate)):
            return found
    return None


def _devices() -> tuple[tuple[Device, ...], str | None]:
    cpu = Device("cpu", os.cpu_count() or 1, platform.processor() or platform.machine())
    if find_spec("torch") is None:
        return (cpu,), None
    try:
        import torch
    except Exception as error:  # a broken wheel raises whatever its loader raises
        return (cpu,), f"{type(error).__name__}: {error}"
    return (cpu, _cuda(torch.cuda), _mps(torch.backends.mps)), None


def _cuda(cuda: Any) -> Device:
    count = int(cuda.device_count()) if cuda.is_available() else 0
    if count:
        return Device("cuda", count, cuda.get_device_name(0))
    driver = shutil.which("nvidia-smi")
    return Device("cuda", 0, "a driver is there, torch sees no device" if driver else "none")


def _mps(mps: Any) -> Device:
    if mps.is_available():
        return Device("mps", 1, platform.processor() or "Apple GPU")
    if platform.system() != "Darwin":
        return Device("mps", 0, "none (not macOS)")
    built = mps.is_built()
    return Device("mps", 0, "none" if built else "this torch was built without MPS")
