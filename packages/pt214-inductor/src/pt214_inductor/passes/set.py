"""Our passes as the one object that inductor calls after the backward is split off.

A pass that fails leaves the graph as it was or as an equal graph, so stock inductor serves the
rest; one log line names the failure, or ``pt214.strict`` makes it an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from pt214_inductor.errors import StrictError
from pt214_inductor.options import Options
from pt214_inductor.passes import hoist_affine

log = logging.getLogger(__name__)


class PassSet(CustomGraphPass):
    """The user's own passes first, then ours."""

    def __init__(self, before: Any, options: Options, fingerprint: str) -> None:
        self.given = before  # as the user set it, for a stock compile
        self.before: list[Callable[[Graph], None]] = (
            list(before) if isinstance(before, (list, tuple)) else [before] if before else []
        )
        self.options = options
        self.fingerprint = fingerprint

    def __call__(self, graph: Graph) -> None:
        """Run the passes over one lowered graph, in place."""
        for each in self.before:
            each(graph)
        if self.options.hoist:
            self._run(hoist_affine.NAME, hoist_affine.run, graph)

    def uuid(self) -> Any | None:
        """Key of our sources, options and the user's passes; None, no caching, if one has none."""
        theirs = [
            each.uuid() if isinstance(each, CustomGraphPass) else None for each in self.before
        ]
        if None in theirs:
            return None
        return repr((self.fingerprint, astuple(self.options), theirs))

    def _run(self, name: str, run: Callable[[Graph], int], graph: Graph) -> None:
        try:
            run(graph)
            graph.lint()
        except Exception as error:
            if self.options.strict:
                raise StrictError(f"pass {name} failed: {error!r} (pt214.strict is on)") from error
            log.warning("pass %s failed, stock inductor serves this graph: %r", name, error)
