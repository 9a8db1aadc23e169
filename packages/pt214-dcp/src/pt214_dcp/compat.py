"""All that leans on torch's inner names or differs between its releases (2.11 and later)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pt214_dcp.errors import NotData
from pt214_dcp.layout import Layout, Mesh, Split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch._C._distributed_c10d import Store


def default_store() -> Store:
    """The store of the default process group; with a reconfigurable group, the one it uses now."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def exchange_device(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor must lie for a collective of ``group``: the CPU where gloo serves it."""
    kinds = [device.type for device in group._device_types]
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def gather_single(found: torch.Tensor, sent: torch.Tensor, **options: Any) -> Any:
    """``sent`` of every rank into ``found``; the function was renamed in torch 2.14."""
    call: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(found, sent, **options)


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; the class is imported only if something looks like one."""
    if type(tensor).__name__ != "DTensor":
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's own part of a DTensor, or the tensor itself; detached, sharing memory."""
    if is_dtensor(tensor):
        # Not to_local(): the first operator on a DTensor imports the compiler, which takes seconds.
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return tensor.detach()


class Layouts:
    """Layouts of DTensors over the ranks of one group, one object for all that are alike.

    Args:
        group_ranks: global rank of each rank of the group that saves or loads.
    """

    def __init__(self, group_ranks: Sequence[int]) -> None:
        self._group_ranks = group_ranks
        self._place_of = {rank: place for place, rank in enumerate(group_ranks)}
        self._meshes: dict[int, tuple[Any, Mesh]] = {}  # by id; the object is kept, so ids last
        self._layouts: dict[tuple[int, Any], Layout] = {}

    def of(self, key: str, tensor: torch.Tensor) -> Layout | None:
        """Layout of a DTensor over group ranks; None for a plain tensor.

        Raises:
            NotData: a placement that holds no complete values, or a mesh with ranks outside the
                group.
        """
        if not is_dtensor(tensor):
            return None
        spec = tensor._spec  # type: ignore[attr-defined]
        seen = (id(spec.mesh), spec.placements)
        layout = self._layouts.get(seen)
        if layout is None:
            splits = tuple(_split_of(key, placement) for placement in spec.placements)
            layout = self._layouts[seen] = Layout(self._mesh(key, spec.mesh), splits)
        return layout

    def _mesh(self, key: str, device_mesh: Any) -> Mesh:
        if id(device_mesh) not in self._meshes:
            mesh_ranks = device_mesh.mesh.flatten().tolist()
            outside = [rank for rank in mesh_ranks if rank not in self._place_of]
            if outside:
                raise NotData(
                    f"{key}: its mesh has ranks {outside} outside the process group of this save, "
                    f"which has {list(self._group_ranks)}; pass the process_group that holds the "
                    "whole mesh"
                )
            ranks = tuple(self._place_of[rank] for rank in mesh_ranks)
            mesh = Mesh(tuple(device_mesh.shape), ranks)
            self._meshes[id(device_mesh)] = (device_mesh, mesh)
        return self._meshes[id(device_mesh)][1]


def _split_of(key: str, placement: Any) -> Split | None:
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind == "Shard":
        return Split(placement.dim)
    if kind == "_StridedShard":
        return Split(placement.dim, int(placement.split_factor))
    raise NotData(
        f"{key}: placement {placement} is not data; allowed are Shard and Replicate (a Partial "
        "holds a sum not yet made: redistribute it first)"
    )
