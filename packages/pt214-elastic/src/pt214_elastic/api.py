"""The package's front door: torch is imported by the first call, not by the import."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pt214_elastic import options
from pt214_elastic.errors import LoopError, OptionError

if TYPE_CHECKING:
    from pt214_elastic.session import Elastic

_session: Elastic | None = None


def init(
    *,
    min_ranks: int | None = None,
    on_fault: str | None = None,
    engine: str = "embedded",
    backend: str = "gloo",
    timeout_s: float = 1800.0,
    in_place: bool | None = None,
) -> Elastic:
    """Enter the job this process was started for, or make a world of one.

    Args:
        min_ranks: fewer than these train no step; ``None`` for the launcher's.
        on_fault: ``"rejoin"``, ``"shrink"``, ``"spare"``, ``"raise"``; ``None`` for the launcher's.
        engine: ``"embedded"``: the coordinator lives in the launcher. No other yet.
        backend: of the process group, as for ``dist.init_process_group``.
        timeout_s: of collectives, in seconds; lost ranks are never waited for so long.
        in_place: change the group in place (torch 2.14 and gloo) or make a new one each epoch;
            ``None`` for what this torch can.

    Returns:
        The session. Under ``python -m pt214_elastic run`` the first ranks return when all are
        there; a replacement returns at once and enters at its first ``track`` or ``steps``.

    Raises:
        OptionError: an argument is not one we know.
        LoopError: called twice in one process.
    """
    global _session
    policy = None if on_fault is None else options.OnFault.parse(on_fault)
    if engine != "embedded":
        raise OptionError(f"engine={engine!r}: expected 'embedded', the only one so far")
    if min_ranks is not None and min_ranks < 1:
        raise OptionError(f"min_ranks={min_ranks}: expected at least 1")
    if _session is not None:
        raise LoopError("pt214_elastic.init is called twice in one process")
    from pt214_elastic.link import JobLink, Link
    from pt214_elastic.session import Elastic

    place = options.read_place()
    timeout = timedelta(seconds=timeout_s)
    link = Link(backend, timeout) if place is None else JobLink(place, backend, timeout, in_place)
    _session = Elastic(link, policy, min_ranks)
    return _session


def init_process_group(*args: Any, **kwargs: Any) -> None:
    """``dist.init_process_group``, reconfigurable where torch allows.

    See :func:`pt214_elastic.reform.init_process_group`.
    """
    from pt214_elastic import reform

    reform.init_process_group(*args, **kwargs)
