"""A store in the memory of the ranks: each holds what it wrote, and what its partner wrote.

    rank r writes    -> own memory and that of rank (r + world_size / 2) % world_size
    any rank reads   -> own memory, then the others', those that should hold it first

Half the ring away is another node where a node has at most half of the ranks, so a lost node loses
nothing. Checkpoints in it are ordinary ones: same plan, checksums, commit and resharding. It lives
as long as the processes: survivors of a failure ``rejoin`` with whoever replaces the lost rank.

Source of the idea: GEMINI, Wang and others 2023, https://doi.org/10.1145/3600006.3613145.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pt214_dcp.errors import BadOption, CommitConflict, StoreError
from pt214_dcp.exchange import Ranks, exchange, members
from pt214_dcp.peers.client import Peer
from pt214_dcp.peers.memory import PIECE_BYTES, Memory
from pt214_dcp.peers.server import Server
from pt214_dcp.stores.base import Entry, checked_name
from pt214_dcp.stores.objects import joined

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger(__name__)
_HOST_BYTES = 64
_ADDRESS = struct.Struct(f"<{_HOST_BYTES}sH32s")
_OWNER = re.compile(r"rank-(\d{5,8})\.")


class PeerMemory:
    """A ``Store`` in the ranks' memory; ``Place(PeerMemory(...))`` is saved to and loaded from.

    Collective: every rank of the group makes one.

    Args:
        budget_bytes: most that this rank holds: its own bytes and its partner's, of all
            checkpoints kept, and of the one being written.
        process_group: who takes part; None is the default group.
        host: address at which the others reach this rank. None is the one from which this machine
            reaches its own name, or loopback.
        timeout_s: of one request.

    Raises:
        BadOption: the budget is not above 0, or the host's name is too long.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        host: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not budget_bytes > 0:
            raise BadOption(f"budget_bytes is {budget_bytes!r}; it must be above 0")
        chosen = host or _own_address()
        if len(chosen.encode()) > _HOST_BYTES:
            raise BadOption(f"host is {chosen!r}; it has at most {_HOST_BYTES} bytes")
        self.memory = Memory(budget_bytes)
        self._host, self._timeout_s = chosen, timeout_s
        self._server = Server(self.memory, self._host, os.urandom(32))
        self._peers: dict[int, Peer] = {}
        self.rejoin(process_group)

    def rejoin(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Meet the ranks of a new group; what this process holds stays. Collective."""
        ranks = members(process_group)
        self.close_peers()
        self.memory.drop_parts()
        self.ranks: Ranks = ranks
        host = self._host.encode()
        mine = _ADDRESS.pack(host, self._server.port, self._server.secret)
        found = [_ADDRESS.unpack(data) for data in exchange(ranks, mine)]
        secret = found[0][2]
        self._server.secret = secret
        for rank, (name, port, _) in enumerate(found):
            if rank != ranks.rank:
                address = name.rstrip(b"\0").decode(), port
                self._peers[rank] = Peer(rank, address, secret, self._timeout_s)
        exchange(ranks, b"\1")  # nobody asks a server that does not know the secret yet

    @property
    def partner(self) -> int:
        """The rank that holds a copy of what this one writes; itself if it is alone."""
        return partner_of(self.ranks.rank, self.ranks.world_size)

    @property
    def url(self) -> str:
        """As ``Store``."""
        return "peers:/"

    def close(self) -> None:
        """Let go of all that is held, and stop answering."""
        self._server.close()
        self.close_peers()
        for entry in [*self.memory.list("")]:
            self.memory.drop(entry.name)

    def close_peers(self) -> None:
        """Hang up all connections; they are opened again when needed."""
        for peer in self._peers.values():
            peer.close()
        self._peers = {}

    def read(self, name: str, offset: int = 0, size: int | None = None) -> bytes:
        """As ``Store``."""
        left = max(0, self.size(name) - offset)
        data = bytearray(left if size is None else min(left, size))
        return bytes(data[: self.read_into(name, offset, memoryview(data))])

    def read_into(self, name: str, offset: int, into: memoryview) -> int:
        """As ``Store``."""

        def fill(peer: Peer | None) -> int:
            at = 0
            while at < len(into):
                some = self._read_some(peer, name, offset + at, len(into) - at)
                if not some:
                    break
                into[at : at + len(some)] = some
                at += len(some)
            return at

        return int(self._first(name, fill))

    def size(self, name: str) -> int:
        """As ``Store``."""

        def look(peer: Peer | None) -> int:
            if peer is None:
                return self.memory.size(name)
            return int(peer.ask("size", name=name)[0]["size"])

        return int(self._first(name, look))

    def write_new(
        self,
        name: str,
        parts: Iterable[memoryview],
        check: Callable[[], None],
        size_bytes: int | None = None,
    ) -> int:
        """As ``Store``; "durable" is: here and at the partner."""
        checked_name(name)
        partner, total = self._peers.get(self.partner), 0
        with contextlib.suppress(FileNotFoundError):
            self.memory.size(name)
            raise FileExistsError(f"{self.url}/{name}: held already")
        try:
            for piece in joined(parts, PIECE_BYTES, check):
                self.memory.append(name, piece, total)
                if partner is not None:
                    partner.ask("append", piece, name=name, at=total)
                total += len(piece)
            if partner is not None:
                partner.ask("finish", name=name)
            self.memory.finish(name)
        except BaseException:
            self.memory.drop(name)
            if partner is not None:
                with contextlib.suppress(StoreError):
                    partner.ask("drop", names=[name])
            raise
        return total

    def read_root(self, name: str) -> tuple[bytes, str | None]:
        """As ``Store``: the latest that any rank holds."""
        data, version = self.memory.root(name)
        for answer, found in self._all("root", name=name):
            if answer["version"] > version:
                data, version = found, answer["version"]
        return data, str(version) if version else None

    def replace_root(self, name: str, data: bytes, expected: str | None) -> None:
        """As ``Store``; the partner's copy comes first, so that none is the only one."""
        checked_name(name)
        if self.read_root(name)[1] != expected:
            raise CommitConflict(f"{self.url}/{name}: another saver committed here meanwhile")
        version = int(expected or 0) + 1
        partner = self._peers.get(self.partner)
        if partner is not None:
            partner.ask("set_root", data, name=name, version=version)
        self.memory.set_root(name, data, version)

    def list(self, prefix: str) -> Iterator[Entry]:
        """As ``Store``: what any rank holds."""
        found = {entry.name: entry for entry in self.memory.list(prefix)}
        for answer, _ in self._all("list", prefix=prefix):
            for entry in answer["entries"]:
                found.setdefault(entry[0], Entry(*entry))
        yield from found.values()

    def delete(self, names: Sequence[str]) -> None:
        """As ``Store``."""
        for name in names:
            self.memory.drop(checked_name(name))
        for _ in self._all("drop", names=list(names)):
            pass

    def sync(self, prefix: str) -> None:
        """As ``Store``: nothing to do."""

    def _read_some(self, peer: Peer | None, name: str, offset: int, size: int) -> bytes:
        if peer is None:
            return self.memory.read(name, offset, size)
        return peer.ask("read", name=name, offset=offset, size=size)[1]

    def _first(self, name: str, call: Callable[[Peer | None], Any]) -> Any:
        """What the first that holds ``name`` answers: this rank, likely holders, all others."""
        checked_name(name)
        found = _OWNER.search(name)
        owner = int(found[1]) if found else 0
        world_size = self.ranks.world_size
        likely = [owner % world_size, partner_of(owner % world_size, world_size)]
        lost: list[str] = []
        with contextlib.suppress(FileNotFoundError):
            return call(None)
        for rank in dict.fromkeys([*likely, *self._peers]):
            if rank in self._peers:
                try:
                    return call(self._peers[rank])
                except FileNotFoundError:
                    continue
                except StoreError as error:
                    lost.append(str(error))
        told = f"; not asked: {'; '.join(lost)}" if lost else ""
        raise FileNotFoundError(f"{self.url}/{name}: no rank holds it{told}")

    def _all(self, op: str, **head: Any) -> Iterator[tuple[dict[str, Any], bytes]]:
        """What every other rank answers; a lost one is left out, and told in the log."""
        for peer in self._peers.values():
            try:
                yield peer.ask(op, **head)
            except StoreError as error:
                logger.warning("%s", error)


def partner_of(rank: int, world_size: int) -> int:
    """The rank half the ring away."""
    return (rank + world_size // 2) % world_size if world_size > 1 else rank


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
