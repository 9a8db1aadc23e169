"""The command line: ``python -m pt214_elastic run [flags] script.py [args]``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pt214_elastic.errors import ElasticError
from pt214_elastic.launch import Launcher
from pt214_elastic.options import OnFault


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level, format="%(asctime)s %(name)s: %(message)s")
    script = ["-m", args.script] if args.module else [args.script]
    try:
        job = Launcher(
            [sys.executable, "-u", *script, *args.args],
            nproc=args.nproc_per_node,
            min_ranks=args.min_ranks,
            on_fault=args.on_fault,
            max_restarts=args.max_restarts,
            hang_timeout_s=args.hang_timeout_s,
            hang_busy_timeout_s=max(args.hang_timeout_s, args.hang_busy_timeout_s),
            log_dir=args.log_dir,
            events_path=args.events,
        )
        return job.run()
    except (ElasticError, OSError) as error:
        print(f"pt214_elastic run: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pt214_elastic", description=__doc__)
    run = parser.add_subparsers(required=True).add_parser(
        "run", help="train a script on several ranks of this host; lost ranks are replaced"
    )
    run.add_argument("--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="N")
    run.add_argument("--min-ranks", type=int, default=1, metavar="N", help="fewer train no step")
    run.add_argument("--on-fault", choices=[str(item) for item in OnFault], default="rejoin")
    run.add_argument("--max-restarts", "--max_restarts", type=int, default=3, metavar="N")
    run.add_argument(
        "--hang-timeout-s", type=float, default=600.0, metavar="S",
        help="a rank that others wait for so long, inside a step and using no CPU, is lost",
    )  # fmt: skip
    run.add_argument(
        "--hang-busy-timeout-s", type=float, default=3600.0, metavar="S",
        help="the same for a rank that uses CPU",
    )  # fmt: skip
    run.add_argument("--log-dir", "--log_dir", type=Path, help="folder for each member's output")
    run.add_argument("--events", type=Path, metavar="FILE", help="write events as JSON lines")
    run.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script")
    run.add_argument("args", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
