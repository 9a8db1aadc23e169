"""Checkpoints in the memory of this rank and of a partner, for when a rank is lost."""

from pt214_dcp.peers.store import PeerMemory
from pt214_dcp.peers.tiers import restore_nearest

__all__ = ["PeerMemory", "restore_nearest"]
