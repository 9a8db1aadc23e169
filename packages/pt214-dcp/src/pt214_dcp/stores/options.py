"""How a store is talked to; checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pt214_dcp.errors import BadOption

LEAST_PART_BYTES = 5 << 20  # S3 takes no smaller part but the last


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """What a caller may choose.

    Attributes:
        timeout_s: of one request.
        max_retries: of one request, after 5xx answers, dropped connections and timeouts.
        retry_s: no retry begins so long after the first try.
        part_bytes: of a multipart upload, at least; grown where an object would need too many.
        concurrency: parts under way at once: an upload holds so many, and one more.
        config: for the store itself, such as ``{"endpoint": ..., "region": ...}``: what obstore's
            ``from_url`` takes, or, for fsspec, its ``storage_options``. What is not given comes
            from the environment, as each store's own tools have it (``AWS_ACCESS_KEY_ID``...).

    Raises:
        BadOption: a number can't be.
    """

    timeout_s: float = 30.0
    max_retries: int = 8
    retry_s: float = 120.0
    part_bytes: int = 8 << 20
    concurrency: int = 4
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        least = {"timeout_s": 0, "retry_s": 0, "max_retries": -1, "concurrency": 0}
        for name, above in least.items():
            value = getattr(self, name)
            if not value > above:
                raise BadOption(f"{name} is {value!r}; it must be above {above}")
        if self.part_bytes < LEAST_PART_BYTES:
            raise BadOption(
                f"part_bytes is {self.part_bytes!r}; S3 takes parts of {LEAST_PART_BYTES} or more"
            )
