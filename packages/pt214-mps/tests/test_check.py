"""The operator table and the command around it."""

import json

import pytest
import torch
from pt214_mps import __main__, check
from pt214_mps.coverage import Entry, Runs, Truth, table
from pt214_mps.coverage.yaml_table import Declared, declared
from pt214_mps.errors import ArgumentError

# Written by hand in the shape of torch's list, one entry per rule.
LIST = Declared(
    [
        {"func": "own(Tensor x) -> Tensor", "dispatch": {"CPU, MPS": "own"}},
        {"func": "delegated(Tensor x) -> Tensor", "structured_delegate": "delegated.out"},
        {"func": "delegated.out(Tensor x) -> Tensor", "dispatch": {"CPU, CUDA, MPS": "f"}},
        {"func": "orphan(Tensor x) -> Tensor", "structured_delegate": "orphan.out"},
        {"func": "orphan.out(Tensor x) -> Tensor", "dispatch": {"CPU": "f"}},
        {"func": "implicit(Tensor x) -> Tensor"},
        {"func": "explicit(Tensor x) -> Tensor", "dispatch": {"CompositeExplicitAutograd": "f"}},
        {"func": "sparse(Tensor x) -> Tensor", "dispatch": {"CPU": "f", "SparseMPS": "g"}},
    ]
)


@pytest.mark.parametrize(
    ("name", "kernel", "composite"),
    [
        ("own", True, False),
        ("delegated", True, False),
        ("orphan", False, False),
        ("implicit", False, True),
        ("explicit", False, True),
        ("sparse", False, False),
    ],
)
def test_each_rule_of_the_list(name: str, kernel: bool, composite: bool) -> None:
    assert LIST.has_kernel(name) is kernel
    assert LIST.is_composite(name) is composite


def test_the_list_agrees_with_the_running_dispatcher_about_the_cpu() -> None:
    """The CPU's kernels are compiled in here, so they check how the list is read."""
    ask = torch._C._dispatch_has_kernel_for_dispatch_key
    found = [n for n in declared().names() if torch._C._dispatch_has_kernel(f"aten::{n}")]
    claimed = [name for name in found if declared().has_kernel(name, "CPU")]
    wrong = [name for name in claimed if not ask(f"aten::{name}", "CPU")]
    assert len(claimed) > 1000
    assert wrong == []


@pytest.mark.skipif(torch.backends.mps.is_built(), reason="a Mac asks its dispatcher")
def test_known_operators_get_their_known_verdicts() -> None:
    assert table(["mm", "rms_norm", "linalg_svd", "linalg_eig"]) == [
        Entry("mm", Runs.STOCK, ""),
        Entry("rms_norm", Runs.OURS, "pt214_mps.rms_norm"),
        Entry("linalg_svd", Runs.COMPOSITE, ""),
        Entry("linalg_eig", Runs.NONE, ""),
    ]
    assert Truth.here() is Truth.LIST


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"no aten::indexx; overloads count"):
        table(["indexx"])


def test_switches_count_when_on_and_watermarks_when_set() -> None:
    found = check.switches(
        {
            "PYTORCH_ENABLE_MPS_FALLBACK": "1",
            "TORCH_ENABLE_MPS_FALLBACK": "0",
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.0",
        }
    )
    assert set(found) == {"PYTORCH_ENABLE_MPS_FALLBACK=1", "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"}


def test_a_switch_turns_the_status_to_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in check.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    healthy = __main__.main(["check", "mm"])
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    assert __main__.main(["check", "mm"]) == 1
    assert "unset PYTORCH_ENABLE_MPS_FALLBACK" in capsys.readouterr().out
    assert healthy == 0 or torch.backends.mps.is_built()


def test_json_has_a_verdict_per_operator(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main(["check", "--json", "mm", "linalg_eig"])
    report = json.loads(capsys.readouterr().out)
    assert set(report["operators"]) == {"mm", "linalg_eig"}
    assert report["truth"]


def test_bad_words_end_with_2_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["check", "nonsense"]) == 2
    assert "no aten::nonsense" in capsys.readouterr().err
    assert __main__.main(["chek"]) == 2
    assert "no command is called 'chek'" in capsys.readouterr().err
