"""Any state on any ranks: drawn meshes, placements, dtypes and ties, saved on N, loaded on M.

Ranks are real gloo processes, begun once for each world size and given one case after the other.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pt214_dcp
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pt214_dcp import loader
from pt214_dcp.compat import local_tensor
from pt214_dcp.layout import Layout, Mesh, Split, local_boxes
from pt214_dcp.staging import bits
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

EXAMPLES = 60
FIXTURE = HealthCheck.function_scoped_fixture  # each example clears its folder itself
WORLDS = (1, 2, 3, 4)
MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,)],
    4: [(4,), (2, 2), (4, 1)],
}
DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
KINDS = sorted(
    (dtype for dtype in DTYPES if "quint" not in str(dtype) and "qint" not in str(dtype)), key=str
)


@dataclass(frozen=True)
class Place:
    """Mesh and, for each of its axes, a cut: dim and parts, or None for replicas."""

    mesh: tuple[int, ...]
    splits: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Drawn:
    """A tensor: contents from ``seed``; ``places`` for saving and loading, or None for plain."""

    shape: tuple[int, ...]
    dtype: int
    seed: int
    places: tuple[Place, Place] | None
    tie: str  # of a plain one: "", "tied" or "view"


@dataclass(frozen=True)
class Case:
    """What N ranks save and M load."""

    saving: int
    loading: int
    tensors: tuple[Drawn, ...]


@st.composite
def places(draw: st.DrawFn, world: int, dims: int) -> Place:
    mesh: tuple[int, ...] = draw(st.sampled_from(MESHES[world]))
    cut = st.tuples(st.integers(0, dims - 1), st.sampled_from([1, 1, 1, 2])) if dims else st.none()
    return Place(mesh, tuple(draw(st.one_of(st.none(), cut)) for _ in mesh))


@st.composite
def tensors(draw: st.DrawFn, saving: int, loading: int) -> Drawn:
    small = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    # The large ones are divided among replicas and have several blocks.
    shape = draw(st.one_of(small, small, st.sampled_from([(700, 800), (3, 1 << 19)])))
    dtype, seed = draw(st.integers(0, len(KINDS) - 1)), draw(st.integers(0, 99))
    if draw(st.integers(0, 3)) == 0:
        return Drawn(shape, dtype, seed, None, draw(st.sampled_from(["", "tied", "view"])))
    pair = (draw(places(saving, len(shape))), draw(places(loading, len(shape))))
    return Drawn(shape, dtype, seed, pair, "")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    saving, loading = draw(st.sampled_from(WORLDS)), draw(st.sampled_from(WORLDS))
    drawn = draw(st.lists(tensors(saving, loading), min_size=1, max_size=4))
    return Case(saving, loading, tuple(drawn))


def whole_of(drawn: Drawn) -> torch.Tensor:
    dtype = KINDS[drawn.dtype]
    generator = torch.Generator().manual_seed(drawn.seed)
    high = 2 if dtype == torch.bool else 256
    size_bytes = math.prod(drawn.shape) * dtype.itemsize
    raw = torch.randint(high, (size_bytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(drawn.shape)


def local_of(whole: torch.Tensor, place: Place, rank: int) -> torch.Tensor:
    """What ``rank`` holds; ``test_layout.py`` holds these boxes against torch's own."""
    splits = tuple(None if cut is None else Split(*cut) for cut in place.splits)
    mesh = Mesh(place.mesh, tuple(range(math.prod(place.mesh))))
    held = local_boxes(tuple(whole.shape), Layout(mesh, splits), rank)
    if not held:
        empty = [0] * whole.dim()
        return whole.new_empty(_empty_shape(whole.shape, place) if whole.dim() else empty)
    ends = [[a + n for a, n in zip(h.local.start, h.local.size, strict=True)] for h in held]
    local = whole.new_empty([max(column) for column in zip(*ends, strict=True)])
    for part in held:
        from_whole = tuple(
            slice(a, a + n) for a, n in zip(part.box.start, part.box.size, strict=True)
        )
        to_local = tuple(
            slice(a, a + n) for a, n in zip(part.local.start, part.local.size, strict=True)
        )
        bits(local)[to_local] = bits(whole)[from_whole]
    return local


def _empty_shape(shape: torch.Size, place: Place) -> list[int]:
    cut = {split[0] for split in place.splits if split is not None}
    return [0 if dim in cut else n for dim, n in enumerate(shape)]


MESH: dict[tuple[int, ...], DeviceMesh] = {}  # of this process; a mesh makes process groups


def value(drawn: Drawn, moment: int, rank: int, *, fill: bool) -> Any:
    whole = whole_of(drawn)
    if not fill:
        bits(whole).zero_()  # bfloat complex has no zeros_like
    if drawn.places is None:
        if drawn.tie == "tied":
            return [whole, whole]
        return [whole, whole[1:]] if drawn.tie == "view" and whole.dim() else [whole]
    place = drawn.places[moment]
    if place.mesh not in MESH:
        MESH[place.mesh] = init_device_mesh("cpu", place.mesh)
    placements = [
        Replicate() if cut is None else Shard(cut[0]) if cut[1] == 1
        else _StridedShard(cut[0], split_factor=cut[1])
        for cut in place.splits
    ]  # fmt: skip
    local = local_of(whole, place, rank)
    return DTensor.from_local(
        local, MESH[place.mesh], placements, run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip


def state_of(case: Case, moment: int, rank: int, *, fill: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"t{at}": value(drawn, moment, rank, fill=fill) for at, drawn in enumerate(case.tensors)
    }
    return found | {"step": 7 if fill else 0}


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [leaf for item in items for leaf in flat(item)]
    if not isinstance(value, torch.Tensor):
        return [value]
    # As bytes: a NaN is equal to nothing, not even to itself.
    return [local_tensor(value).contiguous().reshape(-1).view(torch.uint8)]


def save(case: Case, rank: int, path: str) -> None:
    pt214_dcp.save(state_of(case, 0, rank, fill=True), path)


def load(case: Case, rank: int, path: str) -> None:
    state = state_of(case, 1, rank, fill=False)
    pt214_dcp.load(state, path)
    wanted = state_of(case, 1, rank, fill=True)
    for found, right in zip(flat(state), flat(wanted), strict=True):
        equal = torch.equal(found, right) if isinstance(found, torch.Tensor) else found == right
        assert equal, f"rank {rank}: {found} is not {right}"


JOBS = {"save": save, "load": load}


def serve(rank: int, size: int, store: str, pipe: Any, twin: bool) -> None:
    torch.set_num_threads(1)
    if twin:
        boxes = local_boxes
        setattr(loader, "local_boxes", lambda shape, layout, _: boxes(shape, layout, 0))  # noqa: B010
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    while (job := pipe.recv()) is not None:
        name, case, path = job
        try:
            JOBS[name](case, rank, path)
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc())


class Fleet:
    """Ranks of one world size that do one job after the other."""

    def __init__(self, size: int, folder: Path, *, twin: bool = False) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipes, self._ranks = [], []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            store = str(folder / f"store-{size}")
            arguments = (rank, size, store, theirs, twin)
            process = fork.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(ours)
            self._ranks.append(process)

    def run(self, name: str, case: Case, path: Path) -> None:
        """Have all ranks do it; raises what any of them met."""
        for pipe in self._pipes:
            pipe.send((name, case, str(path)))
        told = [pipe.recv() for pipe in self._pipes]
        assert not any(told), "\n".join(filter(None, told))

    def end(self) -> None:
        """Kill them."""
        for process in self._ranks:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Fleet]]:
    folder = tmp_path_factory.mktemp("fleets")
    found = {size: Fleet(size, folder) for size in WORLDS}
    yield found
    for fleet in found.values():
        fleet.end()


def through(fleets: dict[int, Fleet], case: Case, folder: Path) -> None:
    path = folder / "c"
    shutil.rmtree(path, ignore_errors=True)
    fleets[case.saving].run("save", case, path)
    fleets[case.loading].run("load", case, path)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[FIXTURE])
@given(case=cases())
def test_what_any_ranks_save_any_ranks_load(
    fleets: dict[int, Fleet], tmp_path: Path, case: Case
) -> None:
    through(fleets, case, tmp_path)


def test_a_loader_that_takes_rank_0_for_all_fails_the_property(
    fleets: dict[int, Fleet], tmp_path: Path
) -> None:
    place = Place((2,), ((0, 1),))
    case = Case(2, 2, (Drawn((4, 3), KINDS.index(torch.float32), 1, (place, place), ""),))
    through(fleets, case, tmp_path)
    twin = Fleet(2, tmp_path, twin=True)
    try:
        with pytest.raises(AssertionError, match=r"(?s)rank 1: .* is not"):
            through({2: twin}, case, tmp_path)
    finally:
        twin.end()
