"""What our compiles run under, and nothing else does.

Two traps of inductor's choices handler are closed here. The handler is created on first use and
kept for the thread, so a class set in the config decides later *stock* compiles as well; and a
handler set by hand is in no cache key, so stock's cached artifact would serve our compile. Hence
the handler and the config hold for the same block, both while the graph is split (``compile_fx``)
and in each inner compile, which for the backward runs later, outside of any block of ours. The
pass's ``uuid`` is in the key of every artifact of ours, so neither side can be served the other's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

from pt214_inductor import compat, layout
from pt214_inductor.options import Options

SOURCES = (
    "backend.py", "choices.py", "compat.py", "layout.py", "policy/affine.py", "policy/layout.py",
    "passes/hoist_affine.py", "passes/set.py", "ops/materialise.py",
)  # fmt: skip

PASSES = "post_grad_custom_pre_pass"


@cache
def fingerprint() -> str:
    """Hash of every source that decides what is generated."""
    root = files("pt214_inductor")
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(root.joinpath(source).read_bytes())
    return digest.hexdigest()


def assemble(options: Options, theirs: dict[str, Any]) -> dict[str, Any]:
    """Inductor settings of one compile: the user's, with our pass and our choices added."""
    from pt214_inductor.choices import Choices
    from pt214_inductor.ops.materialise import register_lowering
    from pt214_inductor.passes.set import PassSet

    register_lowering()
    before = theirs.get(PASSES, compat.inductor_setting(PASSES))
    # The layout setting is found inside, where the outermost cache key was taken already: whether
    # the user fixed it must be in that key.
    key = f"{fingerprint()} layout={theirs.get(layout.SETTING, 'found')}"
    ours: dict[str, Any] = {PASSES: PassSet(before, options, key)}
    if not theirs.get("inductor_choices_class", compat.inductor_setting("inductor_choices_class")):
        ours["inductor_choices_class"] = Choices  # the user's own class is left in charge
    return {**theirs, **ours}


@contextmanager
def active(patches: dict[str, Any]) -> Iterator[None]:
    """Hold the settings and the choices handler that belongs to them."""
    with ExitStack() as stack:
        stack.enter_context(compat.inductor_patch(patches))
        if factory := patches.get("inductor_choices_class"):
            stack.enter_context(compat.choices_handler(factory))
        yield


@contextmanager
def stock(patches: dict[str, Any]) -> Iterator[None]:
    """Hold what a stock compile would see, inside of a compile of ours: the user's own settings."""
    from torch._inductor.choices import InductorChoices

    from pt214_inductor.choices import Choices

    factory = patches.get("inductor_choices_class")
    theirs = None if factory is Choices else factory
    off = {PASSES: patches[PASSES].given, "inductor_choices_class": theirs}
    with compat.inductor_patch(off), compat.choices_handler(theirs or InductorChoices):
        yield
