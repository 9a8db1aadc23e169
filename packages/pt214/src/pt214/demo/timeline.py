"""Events of a run, turned into facts and into claims that can fail. Pure: no I/O, no clock.

spawn* epoch(4) commit... [fault] epoch(3) commit... join epoch(4) commit... finish* | resumed*
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from pt214.demo.options import RESUME_RANKS, FaultKind, Options

__all__ = ["Checkpoint", "Claim", "Fault", "Timeline"]

LOSS_TOLERANCE = 1e-5  # relative: the same weights and windows, perhaps another thread count


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed save; times are those of the slowest rank that told them."""

    step: int
    world_size: int
    blocked_s: float
    durable_s: float
    size_bytes: int
    held_out_loss: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Something the demo promises, and whether this run showed it."""

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """The moment the demo hit a rank."""

    time_s: float
    member: int
    step: int  # the last one committed before
    epoch: int


@dataclass(slots=True)
class Timeline:
    """What is known of a run so far. Times are seconds on the launcher's monotonic clock."""

    start_s: float
    world: list[tuple[float, list[int]]] = field(default_factory=list)  # members of each epoch
    losses: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    commits: list[tuple[float, int, int]] = field(default_factory=list)  # time, step, epoch
    told: Counter[tuple[int, int]] = field(default_factory=Counter)  # (step, member) -> times
    pids: dict[int, int] = field(default_factory=dict)  # member -> pid when it began
    kept: dict[int, bool] = field(default_factory=dict)  # member -> same pid when it finished
    fault: Fault | None = None
    save_failures: list[str] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    _saves: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    _parts: Counter[int] = field(default_factory=Counter)  # step -> ranks that told their loss
    _whole: tuple[int, float] | None = None

    def on_epoch(self, time_s: float, members: list[int]) -> None:
        """A group of ``members`` was formed."""
        self.world.append((time_s, list(members)))

    def on_commit(self, time_s: float, step: int, epoch: int) -> None:
        """Every member of ``epoch`` committed ``step``."""
        self.commits.append((time_s, step, epoch))
        self._settle_loss(step)

    def on_fault(self, time_s: float, member: int, step: int, epoch: int) -> None:
        """The demo hit ``member``; ``step`` was the last one committed."""
        self.fault = Fault(time_s, member, step, epoch)

    def on_custom(self, member: int, data: dict[str, Any]) -> None:
        """A rank told something by ``el.emit``; unknown names are ignored."""
        match data["name"]:
            case "begin":
                self.pids[member] = data["pid"]
            case "finish":
                self.kept[member] = self.pids.get(member) == data["pid"]
            case "trained":
                self.told[data["step"], member] += 1
                self.losses[data["step"]] += data["loss"]
                self._parts[data["step"]] += 1
                self._settle_loss(data["step"])
            case "saved":
                self._saves.setdefault(data["step"], {})[member] = data
            case "save_failed":
                self.save_failures.append(f"step {data['step']}: {data['error']}")
            case "resumed":
                self.resumed.append(data["held_out_loss"])

    def _settle_loss(self, step: int) -> None:
        """A step's loss is the sum of its ranks' parts: no number before all of them have told."""
        newer = self._whole is None or step > self._whole[0]
        if newer and self.world and self._parts[step] >= len(self.world[-1][1]):
            self._whole = (step, self.losses[step])

    def newest_loss(self) -> tuple[int, float] | None:
        """The newest step of which every rank has told its part of the loss, and that loss."""
        return self._whole

    def why_not_saved(self) -> str:
        """The first failure, and how many there were."""
        if not self.save_failures:
            return "no save was tried"
        more = len(self.save_failures) - 1
        return self.save_failures[0] + (f" (and {more} more, on all ranks)" if more else "")

    @property
    def world_sizes(self) -> list[int]:
        """World sizes in order, repetitions dropped: [4, 3, 4]."""
        return [size for size, _ in groupby(len(members) for _, members in self.world)]

    @property
    def survivors(self) -> set[int]:
        """Members of the first world that the fault did not hit."""
        first = set(self.world[0][1]) if self.world else set()
        return first - ({self.fault.member} if self.fault else set())

    @property
    def recovery_s(self) -> float | None:
        """Fault to the first commit of a later epoch, which all survivors share."""
        if self.fault is None:
            return None
        later = [time_s for time_s, _, epoch in self.commits if epoch > self.fault.epoch]
        return min(later) - self.fault.time_s if later else None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Committed saves by step."""
        found = []
        for step, by_member in sorted(self._saves.items()):
            each = list(by_member.values())
            found.append(
                Checkpoint(
                    step=step,
                    world_size=each[0]["world_size"],
                    blocked_s=max(one["blocked_s"] for one in each),
                    durable_s=max(one["durable_s"] for one in each),
                    size_bytes=each[0]["size_bytes"],
                    held_out_loss=each[0]["held_out_loss"],
                )
            )
        return found

    def claims(self, options: Options) -> list[Claim]:
        """Everything this run should have shown."""
        ranks, last = options.ranks, options.steps - 1
        faulted = options.fault is not FaultKind.NONE
        worlds = [ranks, ranks - 1, ranks] if faulted else [ranks]
        saved = self.checkpoints[-1].held_out_loss if self.checkpoints else float("nan")
        claims = [
            Claim(f"world size went {' -> '.join(map(str, worlds))}", self.world_sizes == worlds),
            Claim("no surviving process changed", self._pids_kept()),
            Claim("every step was committed exactly once", self._exactly_once(options.steps)),
            Claim(
                f"the last step ({last}) is in the last checkpoint",
                bool(self.checkpoints) and self.checkpoints[-1].step == last,
            ),
            Claim(
                f"loaded on {RESUME_RANKS} ranks, the held-out loss is the saved one",
                len(self.resumed) == RESUME_RANKS
                and all(abs(one - saved) <= LOSS_TOLERANCE * saved for one in self.resumed),
            ),
        ]
        if faulted:
            claims.append(Claim("training went on after the fault", self.recovery_s is not None))
        return claims

    def _pids_kept(self) -> bool:
        return bool(self.survivors) and all(self.kept.get(member) for member in self.survivors)

    def _exactly_once(self, steps: int) -> bool:
        """Each step of the plan once: by the launcher's count, and by each rank's own word."""
        by_launcher = sorted(step for _, step, _ in self.commits) == list(range(steps))
        by_survivors = all(
            self.told[step, member] == 1 for step in range(steps) for member in self.survivors
        )
        return by_launcher and by_survivors and max(self.told.values(), default=0) <= 1
