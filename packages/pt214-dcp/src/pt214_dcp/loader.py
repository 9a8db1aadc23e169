"""One load from call to filled tensors.

take apart - open - compare - find blocks - open files     until here nothing is written
agree: all ranks found all they need in the same generation, or all raise
read into the tensors, check each block - agree again - replace numbers and texts
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pt214_dcp import state
from pt214_dcp.agree import Claim, Task, agree
from pt214_dcp.checkpoint import ROOT_READS, Checkpoint, Replaced, open_checkpoint
from pt214_dcp.compat import Layouts
from pt214_dcp.data_files import DataFiles
from pt214_dcp.errors import LoadFailed, RankLost, SaveFailed, StateMismatch
from pt214_dcp.exchange import Ranks, exchange
from pt214_dcp.find import Finder
from pt214_dcp.fit import Fit, bitmap, fit, unexpected
from pt214_dcp.garbage import uncollected
from pt214_dcp.layout import Box, Held, local_boxes, whole_box
from pt214_dcp.own import OwnFill, own_fills
from pt214_dcp.progress import Told
from pt214_dcp.reads import Reads
from pt214_dcp.staging import bits, part_of
from pt214_dcp.state import Flat
from pt214_dcp.stores.place import Where
from pt214_dcp.table import Table


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a caller may choose; see ``api.load``."""

    cast: bool = False
    partial: bool = False
    progress: Told | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did beyond filling what fits.

    Attributes:
        missing: keys of the state dict that the checkpoint lacks; they were left as they are.
        unexpected: keys of the checkpoint that no rank's state dict has.
        cast: keys whose values were converted to the dtype of the state dict.
        size_bytes: of data read on this rank.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    size_bytes: int = 0


@dataclass
class _Prepared:
    """All that is known before the first byte is written."""

    checkpoint: Checkpoint
    flat: Flat
    fit: Fit
    data: DataFiles
    reads: Reads
    own: list[OwnFill]


@uncollected()  # to its end: a pass when the reads begin would see all that was planned
def load_into(
    state_dict: dict[Any, Any], path: Where, ranks: Ranks, options: LoadOptions
) -> LoadReport:
    """Fill ``state_dict``; see ``api.load`` for arguments and errors."""
    with ExitStack() as files:
        prepared: _Prepared | None = None
        failure: BaseException | None = None
        try:
            prepared = _prepare(state_dict, path, ranks, options, files)
        except Exception as error:  # carried to all ranks, and raised below
            failure = error
        _together(ranks, path, prepared, failure)
        assert prepared is not None
        extra = _unexpected(ranks, prepared)
        if extra and not options.partial:
            raise StateMismatch(str(path), (), extra, ())
        try:
            prepared.reads.run(_counted(options.progress, prepared.reads.size_bytes))
        except Exception as error:
            error.add_note("the state dict is partly overwritten: load another checkpoint into it")
            failure = error
        _together(ranks, path, prepared, failure)
    _replace_values(state_dict, prepared)
    found = prepared.fit
    return LoadReport(
        tuple(found.missing), tuple(extra), tuple(found.cast), prepared.data.read_bytes
    )


@torch.no_grad()
def _prepare(
    state_dict: dict[Any, Any], path: Where, ranks: Ranks, options: LoadOptions, files: ExitStack
) -> _Prepared:
    """Open, compare and find; again, if a saver replaced the checkpoint meanwhile."""
    flat = state.take_apart(state_dict, fill=True)
    for attempt in range(ROOT_READS):
        checkpoint = open_checkpoint(path)
        data = files.enter_context(DataFiles(checkpoint))
        try:
            found = fit(checkpoint, flat, ranks.rank, cast=options.cast)
            if found.different or (found.missing and not options.partial):
                spare = _spare(checkpoint, found)
                raise StateMismatch(str(path), found.missing, spare, found.different)
            reads = Reads(data)
            _plan_leaves(checkpoint, flat, found, reads, ranks)
            own = own_fills(checkpoint, flat, found, reads, ranks)
            if len(checkpoint.commit.tables) > 1:
                _ = checkpoint.tables  # now: in an exchange it would be too late for an error
        except Replaced:
            if attempt + 1 == ROOT_READS or open_checkpoint(path).commit == checkpoint.commit:
                raise
            continue
        return _Prepared(checkpoint, flat, found, data, reads, own)
    raise AssertionError("the last attempt returns or raises")


def _spare(checkpoint: Checkpoint, found: Fit) -> list[str]:
    """For the message: what this rank would call unexpected."""
    if len(checkpoint.commit.tables) > 1:
        return []
    return unexpected(checkpoint, 0, found.used.get(0, set()))


def _plan_leaves(
    checkpoint: Checkpoint, flat: Flat, found: Fit, reads: Reads, ranks: Ranks
) -> None:
    finders: dict[int, Finder] = {}
    layouts = Layouts(ranks.global_ranks)
    for leaf in flat.leaves:
        group = found.home.get(leaf.key)
        if group is None:
            continue
        if group not in finders:
            finders[group] = Finder(checkpoint, group, ranks.rank)
        tensor = leaf.tensor
        if type(tensor) in state.PLAIN and tensor.is_cpu and tensor.is_contiguous():
            whole = finders[group].whole(leaf.key, tensor.dtype)
            if whole is not None and not (tensor.is_conj() or tensor.is_neg()):
                reads.add_whole(*whole, tensor)
                continue
        layout = layouts.of(leaf.key, tensor)
        shape = tuple(tensor.shape)
        helds = [Held(whole_box(shape), whole_box(shape))]
        if layout is not None:
            helds = local_boxes(shape, layout, ranks.rank)
        elif 0 in shape:
            helds = []
        for held in helds:
            into = part_of(tensor, held).detach()
            plan_box(checkpoint.table(group), finders[group], leaf.key, held.box, into, reads)


def plan_box(
    table: Table, finder: Finder, key: str, box: Box, into: torch.Tensor, reads: Reads
) -> None:
    """Plan to fill ``into`` with ``box`` of the tensor ``key``."""
    at = table.home(table.index[key])
    stored = table.tensors[at].dtype
    if at in table.views:
        _plan_view(table, finder, at, box, into, reads)
        return
    if into.is_conj() or into.is_neg():  # its bits are not its values
        plain = torch.empty(into.shape, dtype=into.dtype, device=into.device)
        reads.after(partial(into.copy_, plain))
        into = plain
    if into.dtype == stored:  # bits are moved, never values
        into = bits(into)
        stored = into.dtype
    for found in finder.find(at, box):
        part = into if found.part is box else into[found.part.inside(box)]
        reads.add(found.manifest, found.chunk, found.part, part, stored)


def _plan_view(
    table: Table, finder: Finder, at: int, box: Box, into: torch.Tensor, reads: Reads
) -> None:
    """A view of shared bytes: read those between its first and last element, copy after that."""
    view, record = table.views[at], table.tensors[at]
    width = record.dtype.itemsize
    pairs = list(zip(box.start, box.size, view.strides, strict=True))
    first = view.offset + sum(start * stride for start, _, stride in pairs)
    last = first + sum((size - 1) * stride for _, size, stride in pairs) + 1
    raw = torch.empty((last - first) * width, dtype=torch.uint8)
    for found in finder.find(view.span, Box((first * width,), (raw.numel(),))):
        start = found.part.start[0] - first * width
        piece = raw[start : start + found.part.size[0]]
        reads.add(found.manifest, found.chunk, found.part, piece, torch.uint8)
    spread = raw.view(record.dtype).as_strided(box.size, view.strides)
    if into.dtype == record.dtype and not (into.is_conj() or into.is_neg()):
        into, spread = bits(into), bits(spread)  # torch can't copy values of every dtype
    reads.after(partial(into.copy_, spread))


def _unexpected(ranks: Ranks, prepared: _Prepared) -> list[str]:
    """Keys of the checkpoint that no rank has; asked of all only if one has found any."""
    checkpoint, used = prepared.checkpoint, prepared.fit.used
    local = any(unexpected(checkpoint, group, keys) for group, keys in used.items())
    local = local or len(used) < len(checkpoint.commit.tables)
    if not any(flag != b"\0" for flag in exchange(ranks, bytes([local]))):
        return []
    listed = [list(table.kinds) for table in checkpoint.tables]
    mine = b"".join(bitmap(keys, used.get(group, set())) for group, keys in enumerate(listed))
    number = 0
    for data in exchange(ranks, mine):
        number |= int.from_bytes(data, "little")
    together = number.to_bytes(len(mine), "little")
    found: dict[str, bool] = {}  # a key that any group's rank has is known, in every table
    at = 0
    for keys in listed:
        for number, key in enumerate(keys):
            bit = bool(together[at + number // 8] >> number % 8 & 1)
            found[key] = found.get(key, False) or bit
        at += -(-len(keys) // 8)
    return [key for key, known in found.items() if not known]


def _replace_values(state_dict: dict[Any, Any], prepared: _Prepared) -> None:
    for group in reversed(prepared.fit.groups):
        state.replace_scalars(state_dict, prepared.checkpoint.table(group).tree)
    for fill in prepared.own:
        fill.marker.value = state.replace_scalars(fill.marker.value, fill.tree)


def _together(
    ranks: Ranks, path: Where, prepared: _Prepared | None, failure: BaseException | None
) -> None:
    """All ranks go on with the same generation, or all raise."""
    name = prepared.checkpoint.commit.generation if prepared else ""
    claim = None
    if name:
        claim = Claim(bytes(8), bytes.fromhex(name[4:]), {}, lambda _: {str(path): name})
    try:
        agree(ranks, claim, failure, Task.LOADING)
    except RankLost:
        raise
    except SaveFailed as error:
        raise LoadFailed(f"{path}: not loaded: {error}") from error


def _counted(progress: Told | None, total_bytes: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    done = 0

    def count(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress(done, total_bytes)

    return count
