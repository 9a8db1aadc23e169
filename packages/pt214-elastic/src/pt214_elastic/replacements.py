"""Which lost workers get a successor, and when: the launcher's budget, without processes.

died before anybody reported --put_off--> settled: a job of ours -> wanted
                                                   somebody else's -> its code ends the job
died later -> wanted --> due, once the survivors have their new epoch
"""

from __future__ import annotations

import logging

from pt214_elastic.options import OnFault

log = logging.getLogger("pt214_elastic.launch")

STRANGER_GRACE_S = 30.0  # a death before any worker reported: is it a job of ours at all?
SPAWN_WITHIN_S = 0.5  # survivors may be in a long computation: don't wait for them longer


class Replacements:
    """Keeps the count of restarts and the queue of those to come.

    Args:
        policy: of the job; it may change.
        left: replacements that may still be started.
    """

    def __init__(self, policy: OnFault, left: int) -> None:
        self.policy = policy
        self.left = left
        self._queue: list[int] = []
        self._due_s = 0.0
        self._early: list[tuple[int, int]] = []
        self._early_s = 0.0

    @property
    def expected(self) -> bool:
        """Whether somebody is about to be started, or may yet be."""
        return bool(self._queue) or bool(self._early)

    @property
    def queued(self) -> bool:
        """Whether somebody is about to be started."""
        return bool(self._queue)

    def want(self, local_rank: int, how: str, now_s: float) -> None:
        """Ask for a successor of a worker that ended, ``how`` says in which way."""
        if self.policy not in (OnFault.REJOIN, OnFault.SPARE):
            return
        if self.left == 0:
            log.warning("rank slot %d (%s) is not replaced: no restart is left", local_rank, how)
            return
        self.left -= 1
        self._queue.append(local_rank)
        self._due_s = now_s + SPAWN_WITHIN_S

    def due(self, now_s: float, *, survivors_wait: bool) -> list[int]:
        """Local ranks to start now.

        A fork takes longer than forming the survivors' epoch, so that goes first.
        """
        if survivors_wait and now_s < self._due_s:
            return []
        ranks, self._queue = self._queue, []
        return ranks

    def put_off(self, local_rank: int, code: int, now_s: float) -> None:
        """A worker ended before anybody reported: nothing tells yet whose job this is."""
        self._early.append((local_rank, code))
        self._early_s = now_s

    def settle(self, now_s: float, *, is_ours: bool, anybody_lives: bool) -> int | None:
        """Decide about early deaths; the return code that ends somebody else's job."""
        if not self._early:
            return None
        if is_ours:
            early, self._early = self._early, []
            for local_rank, code in early:
                self.want(local_rank, f"code {code}", now_s)
        elif not anybody_lives or now_s - self._early_s > STRANGER_GRACE_S:
            code = self._early[0][1]
            self._early = []
            return code
        return None
