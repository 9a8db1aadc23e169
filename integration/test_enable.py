"""enable() and disable(), with every part installed, in this process."""

import warnings
from collections.abc import Iterator
from typing import Any

import pt214
import pt214_mps
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystemWriter

stock_dcp: Any = torch.distributed.checkpoint  # gains names that its stubs do not have
PLACES = [
    (torch, "compile"),
    (torch, "randn"),
    (torch.Tensor, "cuda"),
    (torch.Tensor, "to"),
    (torch.nn.Module, "cuda"),
    (torch.mps, "synchronize"),
    (dist, "init_process_group"),
    (distributed_c10d, "init_process_group"),
    (stock_dcp, "save_state_dict"),
    (stock_dcp, "load_state_dict"),
]
no_accelerator = pytest.mark.skipif(
    torch.cuda.is_available() or torch.backends.mps.is_available(), reason="an accelerator is here"
)


@pytest.fixture(autouse=True)
def _stock_afterwards() -> Iterator[None]:
    yield
    pt214.disable()


def test_importing_pt214_changes_nothing_and_disable_restores_the_very_objects() -> None:
    before = [getattr(owner, name) for owner, name in PLACES]
    had_option = hasattr(dist, "set_option")
    with pt214.enable() as enabled:
        assert set(enabled.done) == {"devices", "compile", "mps", "elastic", "dcp"}
        changed = [
            getattr(owner, name) is not old
            for (owner, name), old in zip(PLACES, before, strict=True)
        ]
        assert changed[0]
        assert all(changed[6:])
    assert [getattr(owner, name) for owner, name in PLACES] == before
    assert hasattr(dist, "set_option") == had_option


def test_enabling_twice_is_enabling_once() -> None:
    first = pt214.enable()
    compile_once = torch.compile
    assert pt214.enable() is first
    assert torch.compile is compile_once
    pt214.disable()
    pt214.disable()
    assert torch.compile is not compile_once


def test_steps_can_be_left_out_and_added_later() -> None:
    stock = torch.compile
    enabled = pt214.enable(compile=False, elastic=False, dcp=False, devices=False)
    assert torch.compile is stock
    assert set(enabled.done) == {"mps"}
    pt214.enable(mps=False, elastic=False, dcp=False, devices=False)
    assert torch.compile is not stock


def test_compile_uses_pt214_only_where_no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda *_, backend="stock", **__: seen.append(backend))
    with pt214.enable(elastic=False, dcp=False):
        torch.compile(torch.nn.Linear(1, 1))
        torch.compile(torch.nn.Linear(1, 1), backend="eager")
        torch.nn.Linear(1, 1).compile()
    assert seen == ["pt214", "eager", "pt214"]


@no_accelerator
def test_cuda_requests_land_on_the_cpu_with_one_warning() -> None:
    with pt214.enable(compile=False, elastic=False, dcp=False):
        with pytest.warns(UserWarning, match="no CUDA device: 'cuda' means 'cpu'") as caught:
            tensors = [
                torch.randn(2, device="cuda"),
                torch.zeros(2, device=torch.device("cuda:0")),
                torch.ones(2).cuda(),
                torch.ones(2).to("cuda"),
                torch.ones(2).to("cuda", torch.float64),
                torch.nn.Linear(2, 2).cuda().weight,
                torch.nn.Linear(2, 2).to(torch.device("cuda")).weight,
            ]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        assert tensors[4].dtype is torch.float64
        assert len(caught) == 1
        assert torch.cuda.is_available() is False


@no_accelerator
def test_other_requests_are_passed_on_untouched() -> None:
    with pt214.enable(compile=False, elastic=False, dcp=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.ones(2).to(torch.float16).dtype is torch.float16
        assert torch.empty(2, device="meta").device.type == "meta"
        assert torch.ones(2).to(torch.ones(1, dtype=torch.int8)).dtype is torch.int8
        assert torch.tensor([1, 2]).tolist() == [1, 2]


@no_accelerator
def test_mps_calls_do_nothing_with_one_warning_and_lies_stay_errors() -> None:
    with pt214.enable(compile=False, elastic=False, dcp=False):
        with pytest.warns(UserWarning, match="no MPS device"):
            torch.mps.set_per_process_memory_fraction(0.85)
        torch.mps.synchronize()  # a second warning would be an error here
        assert torch.mps.current_allocated_memory() == 0
        with pytest.raises((RuntimeError, AttributeError)):
            torch.mps.compile_shader("kernel void f() {}")


@no_accelerator
def test_seeding_torch_says_nothing_of_mps() -> None:
    with pt214.enable(compile=False, elastic=False, dcp=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        torch.seed()


def test_where_mps_is_rms_norm_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, which stands in for the device: the kernel itself is tested with its part."""
    import torch._dynamo  # it looks at the function that is replaced below
    from pt214.patches import mps

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(mps, "SERVED", "cpu")
    norm, x = torch.nn.RMSNorm(8), torch.randn(3, 8)
    wanted, stock = norm(x), torch.nn.functional.rms_norm
    calls: list[int] = []
    ours = pt214_mps.rms_norm

    def counted(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
        calls.append(1)
        return ours(x, w, eps)

    monkeypatch.setattr(pt214_mps, "rms_norm", counted)
    with pt214.enable(compile=False, elastic=False, dcp=False, devices=False):
        torch.testing.assert_close(norm(x), wanted)
        assert len(calls) == 1
        torch.nn.functional.rms_norm(x, [3, 8])  # no weight, two dims: stock's
        torch.nn.functional.rms_norm(x.double(), [8], torch.ones(8).double())
        assert len(calls) == 1
    assert torch.nn.functional.rms_norm is stock


def test_a_missing_part_is_skipped_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pt214.parts.find_spec", lambda name: None)
    enabled = pt214.enable()
    assert "pip install 'pt214[dcp]'" in enabled.skipped["dcp"]
    assert set(enabled.done) == {"devices", "mps"}


# Stock deprecates the name; that warning must stay.
@pytest.mark.filterwarnings("ignore:`save_state_dict` is deprecated:FutureWarning")
def test_save_state_dict_with_path_is_ours_and_without_it_stocks(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("checkpoints") / "one"
    with pt214.enable(compile=False, elastic=False):
        state = {"epoch": 3, "model": {"w": torch.arange(4.0)}}
        stock_dcp.save_state_dict(state, path=path).wait()
        blank: dict[str, Any] = {"epoch": 0, "model": {"w": torch.zeros(4)}}
        stock_dcp.load_state_dict(blank, path=path)
        assert blank["epoch"] == 3
        assert torch.equal(blank["model"]["w"], torch.arange(4.0))
        with pytest.raises(TypeError, match="storage_writer"):
            stock_dcp.save_state_dict(state)
        writer = FileSystemWriter(str(path))
        with pytest.raises(TypeError, match=r"got path=.* and a FileSystemWriter"):
            stock_dcp.save_state_dict(state, writer, path=path)


def test_unknown_on_fault_values_are_refused_by_name() -> None:
    with pt214.enable(compile=False, dcp=False):
        dist.set_option("on_fault", "rejoin")  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="on_fault='explode': expected one of 'rejoin'"):
            dist.set_option("on_fault", "explode")  # type: ignore[attr-defined]
