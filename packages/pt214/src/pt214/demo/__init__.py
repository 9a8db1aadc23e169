"""``pt214 demo``: the main job on this machine, through every part.

    text -> 4 ranks (elastic) x compiled GPT (inductor) -> checkpoints (dcp) -> resume on 2 ranks
                     ^ one rank is killed in the middle, and a new process takes its place

``command`` reads the arguments, ``conductor`` runs the ranks and injects the fault, ``worker`` is
one rank, ``timeline`` turns events into facts and claims, ``picture`` draws them.
"""

from pt214.demo.command import main

__all__ = ["main"]
