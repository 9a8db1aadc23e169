"""Telling a lost rank from a mistake in the user's code, by the error a collective raised.

The text only decides whether to ask the coordinator; nothing is swallowed without its word.
"""

from __future__ import annotations

import torch.distributed as dist

from pt214_elastic.errors import ElasticError, ReformFailed, StoreInterrupted

# Words of gloo's and NCCL's errors in torch 2.11 to 2.14, and of our own store.
_WORDS = (
    "gloo",
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "nccl",
    "processgroup",
    "store",
)


def may_be_lost_rank(error: BaseException) -> bool:
    """Whether ``error`` looks like a collective's."""
    if isinstance(error, ElasticError):
        return isinstance(error, StoreInterrupted | ReformFailed)
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _WORDS)
