"""``pt214.enable()``: let scripts written for stock torch gain; ``pt214.disable()`` undoes it all.

    enable() -> [compile] -> [mps] -> [elastic] -> [dcp] -> [devices] -> Enabled (what was done)

Nothing of torch is touched without this call. Each step is one module under ``patches``, which
records every attribute it replaces in one ``PatchSet``; a step whose part is missing is skipped and
says so. Call it before ``from torch.distributed.checkpoint import save_state_dict``: a name that a
script has already imported cannot be replaced for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType

from pt214.parts import part
from pt214.patching import PatchSet

__all__ = ["Enabled", "disable", "enable"]

log = logging.getLogger("pt214")

# Step -> the part it needs, or None. In the order they are applied: "devices" comes last, so that
# its wrapper is the outermost and elastic's init_process_group sees the backend it settled on.
_STEPS: dict[str, str | None] = {
    "compile": "inductor",
    "mps": None,
    "elastic": "elastic",
    "dcp": "dcp",
    "devices": None,
}


@dataclass(slots=True)
class Enabled:
    """What ``enable`` did; as a context manager it is undone at the end of the block."""

    done: dict[str, str] = field(default_factory=dict)  # step -> a sentence for a person
    skipped: dict[str, str] = field(default_factory=dict)  # step -> why, and what to do
    _patches: PatchSet = field(default_factory=PatchSet)

    def __enter__(self) -> Enabled:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        disable()


_active: Enabled | None = None


def enable(
    *,
    compile: bool = True,
    mps: bool = True,
    elastic: bool = True,
    dcp: bool = True,
    devices: bool = True,
) -> Enabled:
    """Make stock calls use the parts that are installed. Idempotent; logs what it did.

    Args:
        compile: ``torch.compile`` uses ``backend="pt214"`` where no backend is named.
        mps: where MPS is, ``rms_norm`` on it is pt214-mps'; where it is not, ``torch.mps`` calls
            do nothing, with one warning.
        elastic: ``torch.distributed.init_process_group`` makes a group that can be re-formed
            in process; adds ``torch.distributed.set_option``.
        dcp: adds ``path=`` to ``torch.distributed.checkpoint.save_state_dict`` and
            ``load_state_dict``; with it they are asynchronous and crash-safe.
        devices: on a machine without CUDA, ``.cuda()``, ``device="cuda"`` and
            ``backend="nccl"`` use the accelerator there is, or the CPU, with one warning.

    Returns:
        What was done and what was skipped. Use it in ``with`` to undo it at the end.

    Raises:
        ImportError: torch is not installed; the message has the command.

    >>> import pt214
    >>> with pt214.enable() as enabled:
    ...     sorted(enabled.done)[:1]
    ['compile']
    """
    global _active
    if find_spec("torch") is None:
        raise ImportError("pt214.enable() needs torch, which is not installed: pip install torch")
    wanted = {"devices": devices, "compile": compile, "mps": mps, "elastic": elastic, "dcp": dcp}
    if _active is None:
        _active = Enabled()
    for step, needs in _STEPS.items():
        if not wanted[step] or step in _active.done:
            continue
        if needs is not None and not part(needs).installed:
            _active.skipped[step] = f"{part(needs).distribution} is missing: {part(needs).install}"
            log.info("enable(%s): skipped, %s", step, _active.skipped[step])
            continue
        apply: Callable[[PatchSet], str] = import_module(f"pt214.patches.{step}").apply
        _active.done[step] = apply(_active._patches)
        _active.skipped.pop(step, None)
        log.info("enable(%s): %s", step, _active.done[step])
    return _active


def disable() -> None:
    """Undo all that ``enable`` did. Harmless where nothing is enabled."""
    global _active
    if _active is not None:
        _active._patches.undo()
        _active = None
        log.info("disable: everything is stock again")
