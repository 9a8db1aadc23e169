"""``prune``, ``repair``, ``compact`` and ``reshard``: keep less, or keep it otherwise."""

from __future__ import annotations

import argparse
from pathlib import Path

from pt214_dcp.checkpoint import open_checkpoint
from pt214_dcp.checkpointer import Checkpointer
from pt214_dcp.cli.answer import Answer, Command, above_zero, path_argument, shown, size_of
from pt214_dcp.errors import BadOption
from pt214_dcp.repair import QUIET_S, repair_all
from pt214_dcp.retention import kept_steps, remove_checkpoint
from pt214_dcp.rewrite import rewrite


def run_prune(arguments: argparse.Namespace) -> Answer:
    """Remove steps beyond the newest ones."""
    if arguments.keep < 1:
        raise BadOption(f"--keep is {arguments.keep}; it must be 1 or more")
    checkpoints = Checkpointer(arguments.path)
    steps = checkpoints.steps()
    kept = kept_steps(checkpoints.folder, steps, arguments.keep, arguments.every)
    removed = [step for step in steps if step not in kept]
    for step in removed:
        if not arguments.dry_run:
            remove_checkpoint(checkpoints.path(step))
    words = "would remove" if arguments.dry_run else "removed"
    facts = {"removed": removed, "kept": sorted(kept), "dry_run": arguments.dry_run}
    return Answer(facts, [f"{words} {removed or 'nothing'}", f"kept {sorted(kept)}"])


def run_repair(arguments: argparse.Namespace) -> Answer:
    """Remove what killed savers left."""
    checkpoints = Checkpointer(arguments.path)
    steps = [path for _, path in checkpoints._folders() if isinstance(path, Path)]
    paths = steps or [arguments.path.absolute()]
    found = repair_all(paths, quiet_s=arguments.quiet_s, dry_run=arguments.dry_run)
    removed = [str(each) for each in found.removed]
    kept = {str(each): why for each, why in found.kept.items()}
    size_bytes = found.size_bytes
    words = "would remove" if arguments.dry_run else "removed"
    lines = [f"{words} {each}" for each in removed]
    lines += [f"kept {each}: {why}" for each, why in kept.items()]
    lines.append(f"{words} {len(removed)} leftovers, {size_of(size_bytes)}")
    return Answer({"removed": removed, "kept": kept, "size_bytes": size_bytes}, lines)


def run_compact(arguments: argparse.Namespace) -> Answer:
    """Write a checkpoint anew, so that it holds its own bytes and no dead ones."""
    path = arguments.path.absolute()
    before = _disk_bytes(arguments)
    with shown(arguments, "compact") as told:
        rewrite(path, path, hashes=arguments.hashes, progress=told)
    after = _disk_bytes(arguments)
    facts = {"before_bytes": before, "after_bytes": after}
    return Answer(facts, [f"{size_of(before)} before, {size_of(after)} after"])


def run_reshard(arguments: argparse.Namespace) -> Answer:
    """Write a checkpoint as so many ranks would have."""
    source, target = arguments.path.absolute(), arguments.target.absolute()
    with shown(arguments, "reshard") as told:
        rewrite(source, target, ranks=arguments.ranks, progress=told)
    made = open_checkpoint(target)
    facts = {"ranks": made.commit.world_size, "size_bytes": made.commit.size_bytes}
    lines = [f"{target}: {made.commit.world_size} ranks, {size_of(made.commit.size_bytes)}"]
    return Answer(facts, lines)


def _disk_bytes(arguments: argparse.Namespace) -> int:
    return sum(file.stat().st_size for file in arguments.path.glob("gen-*/*"))


def _add_prune(parser: argparse.ArgumentParser) -> None:
    path_argument(parser, about="folder of a Checkpointer")
    parser.add_argument("--keep", type=int, required=True, help="so many of the newest steps")
    parser.add_argument("--every", type=above_zero, help="and all steps that this divides")
    parser.add_argument("--dry-run", action="store_true", help="only tell")


def _add_repair(parser: argparse.ArgumentParser) -> None:
    path_argument(parser, about="a checkpoint, or a folder of steps")
    parser.add_argument("--dry-run", action="store_true", help="only tell")
    parser.add_argument(
        "--quiet-s", type=float, default=QUIET_S,
        help="leave alone what changed within so many seconds (%(default).0f), and watch the rest "
        "for so long, 15 at most; 0 if no saver can be alive",
    )  # fmt: skip


def _add_compact(parser: argparse.ArgumentParser) -> None:
    path_argument(parser)
    parser.add_argument("--hashes", action="store_true", help="so that it can be a base")


def _add_reshard(parser: argparse.ArgumentParser) -> None:
    path_argument(parser)
    path_argument(parser, "target", "folder of the new checkpoint")
    parser.add_argument("--ranks", type=int, required=True, help="how many ranks' files to write")


PRUNE = Command("remove old steps", _add_prune, run_prune)
REPAIR = Command("remove what killed saves left", _add_repair, run_repair)
COMPACT = Command("write a checkpoint anew without dead blocks", _add_compact, run_compact)
RESHARD = Command("write a checkpoint as another number of ranks would", _add_reshard, run_reshard)
