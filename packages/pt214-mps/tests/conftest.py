"""A recording stand-in for the library object that ``torch.mps.compile_shader`` returns."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from pt214_mps.kernels import rms_norm


@dataclass
class Recorder:
    """Remembers each launch: kernel, arguments, threads, group_size."""

    launches: list[tuple[str, tuple[Any, ...], int, int]] = field(default_factory=list)

    def __getattr__(self, kernel: str) -> Any:
        def launch(*args: Any, threads: int, group_size: int) -> None:
            self.launches.append((kernel, args, threads, group_size))

        return launch


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(rms_norm, "library", lambda name: found)
    return found
