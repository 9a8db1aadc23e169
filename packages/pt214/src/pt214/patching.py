"""Replace attributes of other modules, and put every one of them back.

``undo`` restores in reverse order, and leaves alone what somebody else has replaced since: taking
their patch away would break them, so it is reported instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

__all__ = ["PatchSet"]

log = logging.getLogger("pt214")
_ABSENT = object()


@dataclass(slots=True)
class PatchSet:
    """Patches in the order they were made."""

    _done: list[tuple[object, str, object, object]] = field(default_factory=list)

    def set(self, owner: object, name: str, value: object) -> None:
        """Set ``owner.name`` to ``value``, remembering what was there (nothing included)."""
        self._done.append((owner, name, vars(owner).get(name, _ABSENT), value))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore everything; afterwards this set is empty and may be used again."""
        while self._done:
            owner, name, before, ours = self._done.pop()
            if vars(owner).get(name, _ABSENT) is not ours:
                log.warning("%s.%s was replaced by someone else: left as it is", owner, name)
            elif before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
