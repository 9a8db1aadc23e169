"""The operator table and the command around it."""

import json

import pytest
import torch
from pt214_mps import __main__, check
from pt214_mps.coverage import Entry, Runs, Truth, table, yaml_table
from pt214_mps.coverage.yaml_table import COMPOSITE, Declared, declared
from pt214_mps.errors import ArgumentError, MPSError

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
        {"func": "base(Tensor x) -> Tensor", "dispatch": {"CPU, MPS": "f"}, "autogen": "base.out"},
        {
            "func": "both(Tensor x) -> Tensor",
            "structured_delegate": "orphan.out",
            "dispatch": {"CompositeExplicitAutograd": "f"},
        },
        {"func": "nowhere(Tensor x) -> Tensor", "dispatch": {}},
        {"func": "light(Tensor x) -> Tensor", "autogen": "light.out"},
        {"func": "heart(Tensor x) -> Tensor", "autogen": "heart.out", "tags": ["core"]},
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
        ("base.out", False, True),
        ("nowhere", False, False),
        ("both", False, True),
    ],
)
def test_each_rule_of_the_list(name: str, kernel: bool, composite: bool) -> None:
    assert LIST.has_kernel(name) is kernel
    assert LIST.is_composite(name) is composite


def test_of_implicit_operators_only_core_ones_have_a_generated_variant() -> None:
    assert LIST.knows("base.out")
    assert LIST.knows("heart.out")
    assert not LIST.knows("light.out")


def test_the_list_and_the_dispatcher_know_the_same_operators() -> None:
    """Both ways, so that "this torch has no such operator" is true wherever it is printed."""
    named, running = set(Truth.LIST.names()), set(Truth.DISPATCHER.names())
    assert len(named) > 3000
    assert named <= running
    ask = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = ("CPU", "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    unlisted = {n for n in running - named if any(ask(f"aten::{n}", key) for key in keys)}
    # Registered by hand in C++, so no list of torchgen's has them.
    by_hand = ("quantized_gru.", "quantized_lstm.", "get_gradients", "shallow_copy_data_")
    assert [name for name in sorted(unlisted) if not name.startswith(by_hand)] == []


def test_the_list_and_the_dispatcher_agree_about_composites() -> None:
    """These kernels are compiled in on any machine."""
    ask = torch._C._dispatch_has_kernel_for_dispatch_key
    found = {n: [ask(f"aten::{n}", key) for key in COMPOSITE] for n in declared().names()}
    told = {name for name in found if declared().is_composite(name)}
    assert [name for name in told if not any(found[name])] == []
    surely = {name for name, keys in found.items() if any(keys[:2])}
    assert surely - told == set()


def test_a_mac_tells_wrappers_of_structured_operators_from_composites() -> None:
    assert Truth.DISPATCHER.is_composite("slice_scatter")  # written in terms of other operators
    assert not Truth.DISPATCHER.is_composite("heaviside")  # a wrapper of heaviside.out
    assert Truth.DISPATCHER.is_composite("adaptive_avg_pool1d")
    assert not declared().knows("get_gradients")  # of TorchScript: the dispatcher alone tells
    assert Truth.DISPATCHER.is_composite("get_gradients")


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


@pytest.mark.parametrize("truth", Truth)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("index", r"got 'index'; this torch has no aten::index; its overloads are index\.Tensor, "),
        ("div", r"its overloads are div\.Scalar, .* and \d+ more$"),
        ("sofmax", r"got 'sofmax'; this torch has no aten::sofmax; near it are .*softmax"),
        ("qqqqqqqq", r"no aten::qqqqqqqq; --all lists every operator"),
        ("", r"got ''; allowed are aten names such as mm or index\.Tensor"),
        ("mm.", r"got 'mm\.'; allowed are aten names"),
        ("mm\n", r"got 'mm\\n'; allowed are aten names"),
        ("prims::add", r"got 'prims::add'; allowed are aten names"),
        ("m\u00e9", r"allowed are aten names"),
    ],
)
def test_an_operator_that_does_not_fit_is_named_with_what_does(
    given: str, message: str, truth: Truth
) -> None:
    with pytest.raises(ArgumentError, match=f"^operators: .*{message}"):
        table([given], truth)


def test_the_prefix_of_torchs_own_messages_is_taken() -> None:
    assert table(["aten::mm"], Truth.LIST) == table(["mm"], Truth.LIST)


def test_a_torch_without_its_list_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_table, "find_spec", lambda name: None)
    with pytest.raises(MPSError, match=r"ships no operator list .*: install torch from a wheel"):
        declared.__wrapped__()


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
    assert "got 'nonsense'; this torch has no aten::nonsense" in capsys.readouterr().err
    assert __main__.main(["chek"]) == 2
    assert "no command is called 'chek'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--all", "mm"], "--all: takes no operators; got mm"),
        (["--jsn"], "unrecognized arguments: --jsn"),
    ],
)
def test_options_that_do_not_fit_are_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["check", *words])
    assert message in capsys.readouterr().err


def test_an_operator_given_twice_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main(["check", "mm", "mm"])
    assert "stock MPS kernel: 1 of 1" in capsys.readouterr().out
