"""What foreign models call, judged by ``check`` and by torchgen's own reading of the same list.

torchgen is what torch's build uses to decide which kernels exist: an oracle that nobody here wrote.
The whole list is printed with passed and failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pt214_mps.coverage import Entry, Runs, Truth, table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

Judge = Callable[[str], Runs]

# The list was fixed before ``check`` was first run over it.
X1, X2, X3 = (4, 8, 16), (2, 4, 12, 12), (2, 4, 6, 6, 6)
Model = tuple[Callable[[], nn.Module], tuple[int, ...]]

MODELS: dict[str, Model] = {
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(16, 2, 32), X1),
    "TransformerEncoderLayer norm_first": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, activation="gelu"),
        X1,
    ),
    "LSTM": (lambda: nn.LSTM(16, 8, num_layers=2, bidirectional=True), X1),
    "GRU": (lambda: nn.GRU(16, 8), X1),
    "Conv1d": (lambda: nn.Conv1d(8, 4, 3, dilation=2), X1),
    "Conv2d": (lambda: nn.Conv2d(4, 8, 3, groups=2), X2),
    "Conv3d": (lambda: nn.Conv3d(4, 8, 3), X3),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), X2),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), X2),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), X2),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True), X2),
    "LayerNorm": (lambda: nn.LayerNorm(16), X1),
    "RMSNorm": (lambda: nn.RMSNorm(16), X1),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), X2),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), X2),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), X3),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), X3),
    "AdaptiveAvgPool3d": (lambda: nn.AdaptiveAvgPool3d(3), X3),
    "AdaptiveMaxPool2d": (lambda: nn.AdaptiveMaxPool2d(3), X2),
    "FractionalMaxPool2d": (lambda: nn.FractionalMaxPool2d(3, output_size=4), X2),
    "LPPool2d": (lambda: nn.LPPool2d(2, 3), X2),
    "Upsample bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), X2),
    "Upsample bicubic": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), X2),
    "Upsample trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), X3),
    "ReflectionPad3d": (lambda: nn.ReflectionPad3d(1), X3),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), X2),
    "Fold and Unfold": (lambda: nn.Sequential(nn.Unfold(3), nn.Fold((12, 12), 3)), X2),
    "activations": (
        lambda: nn.Sequential(
            nn.GELU(), nn.SiLU(), nn.Mish(), nn.ELU(), nn.CELU(), nn.Hardswish(), nn.Hardshrink(),
            nn.Softshrink(), nn.RReLU(), nn.PReLU(), nn.GLU(), nn.Softplus(), nn.LogSigmoid(),
        ),
        X1,
    ),
    "dropouts": (lambda: nn.Sequential(nn.Dropout(), nn.AlphaDropout(), nn.Dropout2d()), X2),
}  # fmt: skip
OPTIMIZERS = ("SGD", "AdamW", "Adafactor", "LBFGS", "NAdam", "RMSprop", "Rprop")
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "svd": lambda x: torch.linalg.svd(x)[1],
    "qr": lambda x: torch.linalg.qr(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x @ x.mT)[0],
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 32 * torch.eye(8)),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "stft": lambda x: torch.stft(x[0], 16, window=torch.hann_window(16), return_complex=True).abs(),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "sort": lambda x: x.sort().values.cumprod(-1),
    "median": lambda x: x.median(-1).values + x.quantile(0.3, -1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "grid_sample": lambda x: nn.functional.grid_sample(
        x[None], x[None, 0, :, :2, None].expand(1, 8, 2, 2).tanh(), align_corners=False
    ),
    "ctc_loss": lambda x: nn.functional.ctc_loss(
        x.log_softmax(-1), torch.ones(8, 2).long(), torch.full((8,), 4), torch.full((8,), 2)
    ),
    "special": lambda x: torch.special.i0e(x) + torch.lgamma(x.abs() + 1) + torch.erfinv(x.tanh()),
}


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the aten operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            base = func._schema.name.removeprefix("aten::")
            self.names.add(base + (f".{func._overloadname}" if func._schema.overload_name else ""))
        return func(*args, **(kwargs or {}))


def run_model(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().train()
    found = model(torch.randn(shape, requires_grad=True))
    found = found[0] if isinstance(found, tuple) else found
    found.square().mean().backward()


def run_optimizer(name: str) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = getattr(torch.optim, name)(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 8)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)


def run_function(name: str) -> None:
    x = (torch.rand(4, 8, 16) * 0.5 + 0.1).requires_grad_()
    FUNCTIONS[name](x).sum().backward()  # type: ignore[no-untyped-call]


def jobs() -> Iterator[tuple[str, Callable[[], None]]]:
    runs = {"model": (MODELS, run_model), "optimizer": (OPTIMIZERS, run_optimizer)}
    runs["function"] = (FUNCTIONS, run_function)
    for kind, (names, run) in runs.items():
        for name in names:
            yield f"{kind} {name}", lambda run=run, name=name: run(name)  # type: ignore[misc]


@pytest.fixture(scope="module")
def called() -> dict[str, set[str]]:
    """What each job calls."""
    found = {}
    for name, run in jobs():
        with Recorder() as recorder:
            run()
        found[name] = recorder.names
    return found


@pytest.fixture(scope="module")
def oracle() -> Judge:
    """What torchgen says of an operator."""
    from torchgen.gen import parse_native_yaml  # type: ignore[import-untyped,unused-ignore]
    from torchgen.model import DispatchKey  # type: ignore[import-untyped,unused-ignore]

    spec = find_spec("torchgen")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0]) / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(root / "native_functions.yaml"), str(root / "tags.yaml"))
    functions = {str(f.func.name): f for f in parsed.native_functions}
    mps = parsed.backend_indices[DispatchKey.MPS]

    def judge(name: str) -> Runs:
        function = functions[name]
        delegate = function.structured_delegate
        if mps.has_kernel(function) or (delegate and mps.has_kernel(functions[str(delegate)])):
            return Runs.STOCK
        composite = (
            function.has_composite_implicit_autograd_kernel
            or function.has_composite_explicit_autograd_kernel
            or function.has_composite_explicit_autograd_non_functional_kernel
        )
        return Runs.COMPOSITE if composite else Runs.NONE

    return judge


def disagreements(
    called: dict[str, set[str]], check: Callable[[str], Entry], oracle: Judge
) -> dict[str, list[str]]:
    """For each job the operators that the two judge differently."""
    found = {}
    for job, names in called.items():
        wrong = []
        for name in sorted(names):
            entry = check(name)
            if entry.runs is not Runs.OURS and entry.runs is not oracle(name):
                wrong.append(f"{name}: {entry.runs.name}, torchgen says {oracle(name).name}")
        found[job] = wrong
    return found


def check(name: str) -> Entry:
    return table([name], Truth.LIST)[0]


def test_check_judges_what_foreign_models_call_as_torchgen_does(
    called: dict[str, set[str]], oracle: Judge, capsys: pytest.CaptureFixture[str]
) -> None:
    found = disagreements(called, check, oracle)
    failed = {job: wrong for job, wrong in found.items() if wrong}
    operators = set().union(*called.values())
    told = [f"{len(found) - len(failed)} of {len(found)} passed, {len(operators)} operators judged"]
    told += [f"  failed {job}: {wrong}" for job, wrong in failed.items()]
    with capsys.disabled():
        sys.stdout.write("\nforeign list: " + "\n".join(told) + "\n")
    assert not failed
    assert len(operators) > 100
    kinds = {check(name).runs for name in operators}
    wanted = set(Runs) - {Runs.OURS}  # the CPU takes RMSNorm apart before its operator is called
    assert kinds == wanted, "a list that never meets one of the verdicts proves too little"


def test_a_check_that_calls_everything_native_fails_the_comparison(
    called: dict[str, set[str]], oracle: Judge
) -> None:
    found = disagreements(called, lambda name: Entry(name, Runs.STOCK, ""), oracle)
    assert any(found.values())
