"""``demo.png``: loss by step, world size by time, and how long each checkpoint stalled training."""

from __future__ import annotations

from pathlib import Path

from pt214.demo.timeline import Timeline

__all__ = ["draw"]


def draw(timeline: Timeline, path: Path) -> None:
    """Draw one run. Needs matplotlib, which ``pt214[demo]`` brings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (top, stalls, bottom) = plt.subplots(
        3, 1, figsize=(9, 8), height_ratios=(3, 1, 1.2), layout="constrained"
    )
    steps = sorted(timeline.losses)
    top.plot(steps, [timeline.losses[step] for step in steps], color="tab:blue", lw=1, label="loss")
    for number, save in enumerate(timeline.checkpoints):
        label = "checkpoint" if number == 0 else None
        top.axvline(save.step, color="tab:green", lw=0.8, alpha=0.5, label=label)
    saves = timeline.checkpoints
    stalls.bar(
        [save.step for save in saves],
        [save.blocked_s * 1e3 for save in saves],
        width=max(1.0, len(steps) / 80),
        color="tab:green",
    )
    stalls.set(xlabel="step", ylabel="stall (ms)", xlim=top.get_xlim())
    top.set(ylabel="loss (nats a byte)", title="Training through a lost rank")

    times = [time_s - timeline.start_s for time_s, _ in timeline.world]
    sizes = [len(members) for _, members in timeline.world]
    end = max((time_s for time_s, _, _ in timeline.commits), default=0.0)
    times.append(max(end - timeline.start_s, times[-1] if times else 0.0))
    bottom.step(times, [*sizes, sizes[-1] if sizes else 0], where="post", color="tab:orange")
    bottom.set(
        xlabel="seconds since the start", ylabel="ranks", ylim=(0, max(sizes, default=1) + 1)
    )
    if timeline.fault is not None:
        fault, healed = timeline.fault, timeline.recovery_s
        note = f"member {fault.member} lost" + (
            f", next commit {healed:.2f} s later" if healed else ""
        )
        top.axvline(fault.step, color="tab:red", ls="--", lw=1, label=note)
        bottom.axvline(fault.time_s - timeline.start_s, color="tab:red", ls="--", lw=1)
    top.legend(loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)
