"""Training that survives lost ranks without restarting a process."""

from pt214_elastic.api import init, init_process_group
from pt214_elastic.errors import (
    ElasticError,
    JobFailed,
    JobOver,
    LoopError,
    OptionError,
    RankLost,
    ReformFailed,
    Repeat,
    StateError,
    StoreInterrupted,
    WireError,
)
from pt214_elastic.events import Event, Kind
from pt214_elastic.options import get_option, set_option

__all__ = [
    "ElasticError",
    "Event",
    "JobFailed",
    "JobOver",
    "Kind",
    "LoopError",
    "OptionError",
    "RankLost",
    "ReformFailed",
    "Repeat",
    "StateError",
    "StoreInterrupted",
    "WireError",
    "get_option",
    "init",
    "init_process_group",
    "set_option",
]
