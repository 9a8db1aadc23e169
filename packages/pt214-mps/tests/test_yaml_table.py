"""Every operator of torch's list, judged by us and by torchgen, which torch's own build asks."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pt214_mps.coverage.yaml_table import declared

Verdict = tuple[bool, bool]  # has an MPS kernel, is made of others
COMPOSITE = "has_composite_{}_kernel"
KINDS = ("implicit_autograd", "explicit_autograd", "explicit_autograd_non_functional")


@pytest.fixture(scope="module")
def torchgen() -> dict[str, Verdict]:
    from torchgen.gen import parse_native_yaml  # type: ignore[import-untyped,unused-ignore]
    from torchgen.model import DispatchKey  # type: ignore[import-untyped,unused-ignore]

    spec = find_spec("torchgen")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]) / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(root / "native_functions.yaml"), str(root / "tags.yaml"))
    functions = {str(each.func.name): each for each in parsed.native_functions}
    mps = parsed.backend_indices[DispatchKey.MPS]

    def judge(function: Any) -> Verdict:
        delegate = function.structured_delegate
        kernel = mps.has_kernel(functions[str(delegate)] if delegate else function)
        composite = any(getattr(function, COMPOSITE.format(kind)) for kind in KINDS)
        return bool(kernel), composite

    return {name: judge(function) for name, function in functions.items()}


def disagreements(
    ours: Callable[[str], Verdict], torchgen: dict[str, Verdict]
) -> dict[str, tuple[Verdict, Verdict]]:
    both = {name: (ours(name), verdict) for name, verdict in torchgen.items()}
    return {name: (mine, theirs) for name, (mine, theirs) in both.items() if mine != theirs}


def ours(name: str) -> Verdict:
    return declared().has_kernel(name), declared().is_composite(name)


def test_every_operator_gets_the_verdict_of_torchgen(torchgen: dict[str, Verdict]) -> None:
    assert set(declared().names()) == set(torchgen)
    assert disagreements(ours, torchgen) == {}
    assert set(torchgen.values()) >= {(True, False), (False, True), (False, False)}


@pytest.mark.parametrize(
    "broken",
    [
        lambda name: (declared().has_kernel(name, "CPU"), declared().is_composite(name)),
        lambda name: (declared().has_kernel(name), False),
        lambda name: (declared().has_kernel(name), not declared().has_kernel(name)),
    ],
    ids=["another backend", "nothing is composite", "what has no kernel is composite"],
)
def test_a_broken_reading_of_the_list_is_noticed(
    broken: Callable[[str], Verdict], torchgen: dict[str, Verdict]
) -> None:
    assert disagreements(broken, torchgen)
