"""``python -m pt214_mps check``: what would run natively here, and which switches hold it back."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pt214_mps.coverage import Entry, Runs, Truth, table
from pt214_mps.coverage.table import COMMON
from pt214_mps.coverage.yaml_table import declared
from pt214_mps.errors import MPSError

__all__ = ["Report", "collect", "main", "switches"]

# variable -> why it holds back. Any value but these counts as on.
_OFF = ("", "0", "false", "False", "off")
SWITCHES = {
    "PYTORCH_ENABLE_MPS_FALLBACK": "operators without an MPS kernel run on the CPU, silently",
    "TORCH_ENABLE_MPS_FALLBACK": "not read by torch; PYTORCH_ENABLE_MPS_FALLBACK is meant",
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "replaces the memory limit; 0.0 means none at all",
    "PYTORCH_MPS_LOW_WATERMARK_RATIO": "moves the point at which memory is collected",
}


@dataclass(frozen=True, slots=True)
class Report:
    """What was found."""

    torch: str
    device: str  # "Apple M3 Max", or why there is none
    available: bool
    truth: Truth
    entries: list[Entry]
    switches: dict[str, str]  # variable -> why it holds back

    @property
    def ok(self) -> bool:
        """Whether nothing holds back: on a Mac the device serves; no switch is set."""
        return not self.switches and (self.available or platform.system() != "Darwin")


def switches(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that are on, and why that holds back. Watermarks count whenever they are set."""
    found = {}
    for name, why in SWITCHES.items():
        value = environment.get(name, "")
        is_set = bool(value) if "WATERMARK" in name else value not in _OFF
        if is_set:
            found[f"{name}={value}"] = why
    return found


def collect(operators: Sequence[str]) -> Report:
    """Look at this machine and at ``operators``."""
    available = bool(torch.backends.mps.is_available())
    return Report(
        torch=torch.__version__,
        device=_device(available),
        available=available,
        truth=Truth.here(),
        entries=table(operators),
        switches=switches(os.environ),
    )


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 if nothing holds back, 1 if something does, 2 for an unknown operator.

    Raises:
        SystemExit: 2, an option is unknown, or ``--all`` comes with operators.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pt214_mps check",
        description="What runs natively on MPS with this torch, and what holds it back.",
    )
    parser.add_argument("operators", nargs="*", help="aten names, such as mm or index.Tensor")
    parser.add_argument("--all", action="store_true", help="every operator of this torch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = parser.parse_args(argv)
    if words.all and words.operators:
        parser.error(f"--all: takes no operators; got {' '.join(words.operators)}")
    try:
        names = declared().names() if words.all else words.operators or COMMON
        report = collect(list(dict.fromkeys(names)))  # a name given twice is one row
    except MPSError as error:
        sys.stderr.write(f"pt214-mps check: {error}\n")
        return 2
    sys.stdout.write((_as_json(report) if words.json else _as_text(report)) + "\n")
    return 0 if report.ok else 1


def _device(available: bool) -> str:
    if available:
        return f"{platform.processor()} on macOS {platform.mac_ver()[0]}"
    if platform.system() != "Darwin":
        return f"none: this is {platform.system()} on {platform.machine()}"
    if not torch.backends.mps.is_built():
        return "none: this torch was built without MPS; install the macOS arm64 wheel"
    return f"none: macOS {platform.mac_ver()[0]} is too old, or the process has no GPU"


def _as_json(report: Report) -> str:
    return json.dumps(
        {
            "ok": report.ok,
            "torch": report.torch,
            "device": report.device,
            "truth": report.truth.value,
            "operators": {e.operator: {"runs": e.runs.name.lower(), "by": e.by}
                          for e in report.entries},
            "switches": report.switches,
        },
        indent=2,
    )  # fmt: skip


def _as_text(report: Report) -> str:
    lines = [f"torch {report.torch}; MPS device: {report.device}", f"source: {report.truth.value}"]
    for runs in Runs:
        found = [e for e in report.entries if e.runs is runs]
        lines.append(f"\n{runs.value}: {len(found)} of {len(report.entries)}")
        shown = found if len(report.entries) <= 200 or runs in (Runs.NONE, Runs.OURS) else []
        lines += [f"  {e.operator}" + (f"  ({e.by})" if e.by else "") for e in shown]
    for name, why in report.switches.items():
        lines.append(f"\nholds you back: {name}: {why}\n  -> unset {name.partition('=')[0]}")
    return "\n".join(lines)
