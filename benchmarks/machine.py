"""What a figure was measured on: processor, memory, file system, GPU, versions.

Facts that would name the machine or its owner (host name, serial numbers, paths) stay out.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

VERSIONED = ("torch", "numpy", "safetensors", "torch_checkpointing", "xxhash")


def name() -> str:
    """Short, for file names: ``Linux-x86_64-2cpu``."""
    return f"{platform.system()}-{platform.machine()}-{os.cpu_count()}cpu"


def facts(folder: Path | None = None) -> dict[str, Any]:
    """Facts of this machine; ``folder`` is where the benchmark writes (the temporary one)."""
    return {
        "name": name(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "disk": file_system(folder or Path(tempfile.gettempdir())),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Of torch and of every rival that is installed."""
    found = {}
    for package in VERSIONED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}


def file_system(folder: Path) -> str:
    """Type and device of what holds ``folder``: ``ext4 on vda``; ``unknown`` off Linux."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text()
    except OSError:
        return "unknown"
    found = (Path("/"), "unknown")
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4])
        kind, source = after.split()[:2]
        if folder.resolve().is_relative_to(point) and len(point.parts) >= len(found[0].parts):
            device = f" on {Path(source).name}" if source.startswith("/dev/") else ""
            found = (point, f"{kind}{device}")
    return found[1]


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
