"""Print what ``collect`` saw and what ``diagnose`` made of it, as text or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from pt214.doctor.diagnose import Finding, Severity, diagnose
from pt214.doctor.facts import Facts, collect

__all__ = ["as_json", "as_text", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``pt214 doctor``.

    Returns:
        0 if nothing holds the user back, else 1.
    """
    parser = argparse.ArgumentParser(
        prog="pt214 doctor",
        description="Versions, devices, what is missing, and what holds you back.",
        epilog="Exit status: 0 nothing wrong, 1 at least one problem.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON for a bug report")
    arguments = parser.parse_args(argv)
    facts = collect()
    findings = diagnose(facts)
    render = as_json if arguments.json else as_text
    sys.stdout.write(render(facts, findings) + "\n")
    return int(any(finding.severity is Severity.PROBLEM for finding in findings))


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """One object with ``facts``, ``findings`` and ``ok``.

    Of the environment only variables that torch or pt214 read are kept: the rest may be secret.
    """
    shown = asdict(facts)
    shown["environment"] = {
        name: value
        for name, value in facts.environment.items()
        if name.startswith(("PT214_", "PYTORCH_", "TORCH", "TRITON_", "CUDA_", "NCCL_", "OMP_"))
    }
    listed = [{**asdict(finding), "severity": finding.severity.value} for finding in findings]
    ok = all(finding.severity is not Severity.PROBLEM for finding in findings)
    return json.dumps({"ok": ok, "facts": shown, "findings": listed}, indent=2)


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """A page for a person."""
    lines = [f"Python {facts.python} on {facts.system} {facts.machine}"]
    lines += _row("torch", facts.torch or "missing")
    lines += _row("triton", facts.triton or "missing")
    lines += _row("C++", facts.cxx or "missing")
    for name, version in facts.parts.items():
        lines += _row(f"pt214-{name}", version or "missing")
    for device in facts.devices:
        count = f"{device.count} x " if device.count else ""
        lines += _row(device.kind, f"{count}{device.detail}")
    for finding in findings:
        mark = "PROBLEM" if finding.severity is Severity.PROBLEM else "note"
        lines += ["", f"{mark}: {finding.subject}: {finding.text}", f"  -> {finding.remedy}"]
    problems = sum(finding.severity is Severity.PROBLEM for finding in findings)
    lines += ["", "nothing wrong" if not problems else f"{problems} problem(s)"]
    return "\n".join(lines)


def _row(name: str, value: str) -> list[str]:
    return [f"  {name:<16}{value}"]
