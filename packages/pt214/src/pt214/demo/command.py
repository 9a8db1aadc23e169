"""``pt214 demo``: check the arguments, prepare the plan, run, report, and judge the run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pt214.demo.options import REMOVED, DemoError, Options, Plan, parse
from pt214.demo.timeline import Timeline
from pt214.parts import PARTS, load, part

__all__ = ["main"]

SAVES = 8  # checkpoints in a run: one every few seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0 if every claim was shown; 1 if one failed; 2 for bad arguments; 130 after
        Ctrl-C.

    Raises:
        MissingPart: pt214-elastic or pt214-dcp is not installed.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        plan, plan_path = _prepare(options)
        from pt214.demo.conductor import run

        timeline = run(options, plan, plan_path)
        return _report(options, timeline)
    except DemoError as error:
        sys.stderr.write(f"pt214 demo: {error}\n")
        return 2
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        told = f"{error.strerror or error}{where}; free space, or name another folder with --out"
        sys.stderr.write(f"pt214 demo: {told}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("pt214 demo: stopped; no process is left behind\n")
        return 130


def _prepare(options: Options) -> tuple[Plan, Path]:
    for name in ("elastic", "dcp"):
        load(name, why="pt214 demo")
    for module in ("tqdm", "matplotlib"):
        try:
            version(module)
        except PackageNotFoundError:
            raise DemoError(f"{module} is not installed: pip install 'pt214[demo]'") from None
    from pt214.demo.text import gather  # imports torch: only once the cheap checks have passed

    text = gather(options.text)
    for name in REMOVED:  # of an earlier demo: its report must not be taken for this run's
        shutil.rmtree(options.out / name, ignore_errors=True)
        (options.out / name).unlink(missing_ok=True)
    work = options.out / "work"
    work.mkdir()
    (work / "text.bin").write_bytes(text)
    plan = Plan(
        text=str(work / "text.bin"),
        checkpoints=str(options.out / "checkpoints"),
        cache=str(work / "cache"),
        steps=options.steps,
        ranks=options.ranks,
        every=max(1, options.steps // SAVES),
        device=_device(options),
        compile=_can_compile(),
    )
    plan.write(work / "plan.json")
    _greet(options, plan, len(text))
    return plan, work / "plan.json"


def _device(options: Options) -> str:
    """MPS serves one process; several ranks share the CPU's cores."""
    import torch

    return "mps" if options.ranks == 1 and torch.backends.mps.is_available() else "cpu"


def _can_compile() -> bool:
    from pt214.doctor import collect

    return part("inductor").installed and collect().cxx is not None


def _greet(options: Options, plan: Plan, size_bytes: int) -> None:
    source = options.text or "Python's standard library"
    compiled = "compiled by pt214"
    if not plan.compile:
        missing = "C++ compiler" if part("inductor").installed else "pt214-inductor"
        compiled = f"not compiled (no {missing})"
    ranks = "1 rank" if options.ranks == 1 else f"{options.ranks} ranks"
    sys.stdout.write(
        f"A small GPT on {size_bytes / 1e6:.1f} MB of {source}: {ranks} on "
        f"{plan.device}, {options.steps} steps, {compiled}; fault: {options.fault}\n"
    )
    sys.stdout.flush()


def _report(options: Options, timeline: Timeline) -> int:
    from pt214.demo.picture import draw

    claims = timeline.claims(options)
    saves = timeline.checkpoints
    facts = {
        "world_sizes": timeline.world_sizes,
        "pids_kept": next(c.holds for c in claims if "process" in c.text),
        "recovery_s": timeline.recovery_s,
        "steps_committed": len({step for _, step, _ in timeline.commits}),
        "loss_saved": saves[-1].held_out_loss if saves else None,
        "loss_resumed": timeline.resumed[0] if timeline.resumed else None,
        "checkpoints": [asdict(save) for save in saves],
        "save_failures": timeline.save_failures,
        "losses": [timeline.losses[step] for step in sorted(timeline.losses)],
        "claims": [asdict(claim) for claim in claims],
        "versions": _versions(),
    }
    _write(options.out / "demo.json", json.dumps(facts, indent=2))
    draw(timeline, options.out / "demo.png")
    for claim in claims:
        sys.stdout.write(f"  {'ok' if claim.holds else 'FAILED'}: {claim.text}\n")
    if timeline.recovery_s is not None:
        sys.stdout.write(f"  from the hit to the next commit: {timeline.recovery_s:.3f} s\n")
    sys.stdout.write(f"  {options.out / 'demo.png'}\n  {options.out / 'demo.json'}\n")
    shown = all(claim.holds for claim in claims)
    if not shown and timeline.save_failures:
        sys.stderr.write(f"pt214 demo: a save failed at {timeline.save_failures[-1]}\n")
    return 0 if shown else 1


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a full disk must not leave half a report."""
    partial = path.with_suffix(".part")
    partial.write_text(text)
    os.replace(partial, path)


def _versions() -> dict[str, str | None]:
    import platform

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "pt214", *(each.distribution for each in PARTS)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
