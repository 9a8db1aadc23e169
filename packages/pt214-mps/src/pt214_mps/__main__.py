"""``python -m pt214_mps``: commands of this part.

check [OPERATOR ...] [--all] [--json]     what runs natively on MPS, and what holds it back
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Its exit status; 2 where there is no such command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["check"]:
        from pt214_mps import check

        return check.main(words[1:])
    text = (__doc__ or "").strip() + "\n"
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(text)
        return 0
    sys.stderr.write(f"pt214_mps: no command is called {words[0]!r}\n{text}")
    return 2


if __name__ == "__main__":
    sys.exit(main())
