"""Forming the default process group anew in the same process: what differs between torch versions.

torch 2.14 with gloo:  ``_reconfigure(uuid, handles)``; the group object stays the same
before, other backends, or where that fails:  destroy, then init under the epoch's own store prefix

All members of an epoch must go the same way, so its record decides: a member that can't change its
group in place gives an empty handle, and one empty handle sends everybody the long way.

Every private name of torch that this package needs for it is used in this module alone.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from pt214_elastic.errors import ReformFailed
from pt214_elastic.records import Record

log = logging.getLogger("pt214_elastic.reform")

FORM_WITHIN = timedelta(seconds=60)
COUNT = "_get_sequence_number_for_group"  # torch's stubs lack it
TRIES_IN_PLACE = 2  # a peer's death may be heard of only after the error that it caused


def supports_reconfigure(backend: str | None) -> bool:
    """Whether this torch can change a group of ``backend`` in place."""
    return hasattr(dist, "_reconfigure") and backend in ("gloo", "cpu:gloo")


class Group:
    """This process's default group, through all epochs.

    Args:
        store: lives longer than any epoch.
        member: unique in the job; it makes the reconfigure handle unique.
        backend: as for ``dist.init_process_group``.
        timeout: of collectives; a lost rank never waits for it.
        in_place: use ``_reconfigure``; ``None`` where it is there.
    """

    def __init__(
        self,
        store: Store,
        member: int,
        backend: str,
        timeout: timedelta,
        in_place: bool | None = None,
    ) -> None:
        self.in_place = supports_reconfigure(backend) if in_place is None else in_place
        self._store, self._backend, self._timeout = store, backend, timeout
        self._failures = 0  # in a row, of forming in place, with nobody lost
        if dist.is_initialized():
            log.info("the default process group is replaced by a reconfigurable one")
            dist.destroy_process_group()
        if self.in_place:
            try:
                self._init(store, member, member + 1, enable_reconfigure=True)
            except Exception as error:  # private names of torch: anything may change
                self._give_up(error)

    def _init(self, store: Store, rank: int, world_size: int, **more: Any) -> None:
        dist.init_process_group(
            self._backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=self._timeout,
            **more,
        )

    def handle(self) -> str:
        """What peers need of this process to form the next group in place; empty if it can't."""
        if not self.in_place:
            return ""
        try:
            return str(_api("_get_reconfigure_handle")())
        except Exception as error:
            self._give_up(error)
            return ""

    def excuse(self) -> None:
        """A rank was lost: that, not the way it was formed, explains the last failure."""
        self._failures = 0

    def form(self, record: Record, rank: int) -> None:
        """Become the group of ``record``.

        Raises:
            ReformFailed: it can't be done in place; a later record may be formed the long way.
            RuntimeError: a peer is lost or late; the group can be formed again for a later record.
        """
        handles = [handle for _, handle in record.members]
        if self.in_place and all(handles):
            self._form_in_place(record.uuid, handles)
            return
        self.in_place = False  # some member can't, and a plain group can't be changed later
        if dist.is_initialized():
            dist.destroy_process_group()
        store = PrefixStore(f"epoch-{record.epoch}", self._store)
        self._init(store, rank, len(record.members))

    def _form_in_place(self, uuid: int, handles: list[str]) -> None:
        try:
            reconfigure(uuid, handles)
        except Exception as error:
            self._failures += 1
            if self._failures == TRIES_IN_PLACE:
                self._give_up(error)
            raise ReformFailed(f"the group can't be changed in place: {error!r}") from error
        self._failures = 0

    def _give_up(self, error: Exception) -> None:
        log.warning("groups are made anew from now on, not changed in place: %r", error)
        self.in_place = False


def reconfigure(uuid: int, handles: list[str]) -> None:
    """Change the default group in place to the ranks behind ``handles``, in that order."""
    work = _api("_reconfigure")(uuid=uuid, handles=handles, timeout=FORM_WITHIN)
    work.wait()
    # The Python side keeps the old world's ranks: broadcast(src=) would refuse the new ones.
    world = distributed_c10d._world
    group = distributed_c10d._get_default_group()
    world.pg_group_ranks[group] = {rank: rank for rank in range(len(handles))}


def posted() -> int:
    """Operations that this rank has begun on the default group, in all; 0 where torch can't tell.

    The backend counts them as a call enters it, so one that blocks is counted.
    """
    group = distributed_c10d.GroupMember.WORLD
    try:
        return 0 if group is None else int(getattr(group, COUNT)())
    except (RuntimeError, AttributeError):  # no count is kept, or the group is being destroyed
        return 0


def _api(name: str) -> Any:
    return getattr(dist, name)


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | None = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """``dist.init_process_group``, with a group that can be reconfigured where torch allows.

    Args: as of ``torch.distributed.init_process_group``. Where the backend is not gloo or torch
        is older than 2.14 the group is a plain one.
    """
    more: dict[str, Any] = {}
    if supports_reconfigure(backend):
        more["enable_reconfigure"] = True
    dist.init_process_group(
        backend, init_method, timeout, world_size, rank, store, group_name, pg_options, device_id,
        **more,
    )  # fmt: skip
    if more:
        _first_reconfigure()


def _first_reconfigure() -> None:
    """A reconfigurable group has no connections until its ranks have exchanged handles."""
    store = distributed_c10d._get_default_store()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restart may share the store
    keys = [f"pt214/handle/{attempt}/{item}" for item in range(world_size)]
    store.set(keys[rank], _api("_get_reconfigure_handle")())
    store.wait(keys)
    handles = [store.get(key).decode() for key in keys]
    reconfigure(1, handles)
