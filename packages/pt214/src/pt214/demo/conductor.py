"""Run the ranks, hit one of them in the middle, and tell the story while it happens."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pt214.demo.options import RESUME_RANKS, DemoError, FaultKind, Options, Plan
from pt214.demo.timeline import Timeline

__all__ = ["run"]

_SIGNALS = {FaultKind.KILL: signal.SIGKILL, FaultKind.STOP: signal.SIGSTOP}


def run(options: Options, plan: Plan, plan_path: Path) -> Timeline:
    """Train, then resume the last checkpoint on other ranks.

    Raises:
        DemoError: the ranks failed; the message names the log to read.
    """
    conductor = _Conductor(options)
    environment = {"TORCHINDUCTOR_CACHE_DIR": plan.cache}
    logs = options.out / "logs"
    words = [sys.executable, "-m", "pt214.demo.worker", str(plan_path)]
    conductor.launch(words, options.ranks, logs, environment)
    saves = conductor.timeline.checkpoints
    if not saves:
        raise DemoError(f"no checkpoint was committed: {conductor.timeline.why_not_saved()}")
    last = Path(plan.checkpoints) / f"step-{saves[-1].step:06}"
    conductor.say(f"resuming {last.name} on {RESUME_RANKS} ranks")
    words = [sys.executable, "-m", "pt214.demo.resume", str(plan_path), str(last)]
    conductor.launch(words, RESUME_RANKS, logs / "resume", environment, watch=False)
    return conductor.timeline


class _Conductor:
    def __init__(self, options: Options) -> None:
        from tqdm import tqdm

        self._options = options
        self._fault_at = options.steps // 3
        self._job: Any = None
        self._watch = True
        self._told = False
        self.timeline = Timeline(time.monotonic())
        # Without a terminal (disable=None) the bar is silent and _on_commit prints tenths instead.
        self._bar = tqdm(
            total=options.steps, unit="step", dynamic_ncols=True, leave=False, disable=None
        )
        self._last_step = -1

    def say(self, text: str) -> None:
        """One line of the story, above the progress bar."""
        self._bar.write(f"{time.monotonic() - self.timeline.start_s:6.1f} s  {text}")

    def launch(
        self,
        words: list[str],
        ranks: int,
        logs: Path,
        environment: dict[str, str],
        *,
        watch: bool = True,
    ) -> None:
        from pt214_elastic.launch import Launcher

        self._watch = watch
        self._job = Launcher(
            words,
            nproc=ranks,
            min_ranks=1,
            on_fault="rejoin" if watch else "raise",
            env=environment,
            log_dir=logs,
            on_event=self._on_event,
        )
        code = self._job.run()
        if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            self._bar.close()
            raise KeyboardInterrupt
        if code != 0:
            self._bar.close()
            raise DemoError(f"the ranks ended with status {code}; their output is in {logs}")
        if not watch:
            self._bar.close()

    def _on_event(self, event: Any) -> None:
        handler = getattr(self, f"_on_{event.kind}", None)
        if handler is not None:
            handler(event)

    def _on_spawn(self, event: Any) -> None:
        self.say(f"member {event.member} started, pid {event.data.get('pid')}")

    def _on_exit(self, event: Any) -> None:
        if event.data.get("how") not in (0, "0", "exit 0"):
            self.say(f"member {event.member} ended: {event.data.get('how')}")

    def _on_fault(self, event: Any) -> None:
        # Empty while it is only a suspicion; resuming ranks just end, and so do those of Ctrl-C.
        told = self._watch and not self._job.stopping
        for member in event.data.get("lost", ()) if told else ():
            self.say(f"noticed: member {member} is lost")

    def _on_epoch(self, event: Any) -> None:
        members = event.data["members"]
        if self._watch:
            self.timeline.on_epoch(event.time_s, members)
        self.say(f"epoch {event.epoch}: {len(members)} ranks, members {members}")

    def _on_repeat(self, event: Any) -> None:
        self.say(f"member {event.member} repeats step {event.step}")

    def _on_commit(self, event: Any) -> None:
        if not self._watch:
            return
        self.timeline.on_commit(event.time_s, event.step, event.epoch)
        self._progress(event.step)
        healed = self.timeline.recovery_s
        if healed is not None and not self._told:
            self._told = True
            self.say(f"step {event.step} committed by every survivor, {healed:.3f} s after the hit")
        if self.timeline.fault is None and event.step >= self._fault_at:
            self._hit(event)

    def _progress(self, step: int) -> None:
        if step <= self._last_step:
            return
        self._bar.update(step - self._last_step)
        self._last_step = step
        if self._bar.disable and (step + 1) % max(1, self._options.steps // 10) == 0:
            whole = self.timeline.newest_loss()
            loss = f", loss {whole[1]:.3f} at step {whole[0] + 1}" if whole else ""
            self.say(f"step {step + 1} of {self._options.steps}{loss}")

    def _hit(self, event: Any) -> None:
        if self._options.fault is FaultKind.NONE:
            return
        workers = self._job.workers()
        victim = sorted(workers)[self._options.ranks // 2]
        self.say(f"{_SIGNALS[self._options.fault].name} to member {victim}, pid {workers[victim]}")
        self.timeline.on_fault(time.monotonic(), victim, event.step, event.epoch)
        with contextlib.suppress(ProcessLookupError):
            os.kill(workers[victim], _SIGNALS[self._options.fault])

    def _on_custom(self, event: Any) -> None:
        data = {**event.data, "step": event.step}
        self.timeline.on_custom(event.member, data)
        if data["name"] == "trained":
            if whole := self.timeline.newest_loss():
                self._bar.set_postfix(loss=f"{whole[1]:.3f}", refresh=False)
        elif data["name"] == "save_failed":
            told = f"save of step {data['step']} abandoned by member {event.member}"
            self.say(f"{told}: {data['error']}")
