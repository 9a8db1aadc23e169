"""Models that nobody wrote for this backend: outputs and gradients against eager, on the CPU.

The list was fixed before the first run. By default one transformer layer and one convolution
block go through; ``PT214_FOREIGN=all pytest -v`` runs the whole list, with ``dynamic`` unset and
True, and prints what passed and failed (``transformers`` models are skipped where it is not
installed).
"""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from pt214_inductor.backend import compile_fx
from torch import nn

Case = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]
IDS = (2, 16)


def hub(model: str, config: str, **sizes: Any) -> Case:
    def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
        if "pixels" in made.main_input_name or made.main_input_name == "pixel_values":
            side = sizes.get("image_size", 32)
            return made, (), {"pixel_values": torch.randn(2, 3, side, side)}
        return made, (), {"input_ids": torch.randint(0, 50, IDS)}

    return build


def plain(make: Callable[[], nn.Module], *shapes: tuple[int, ...]) -> Case:
    return lambda: (make(), tuple(torch.randn(shape) for shape in shapes), {})


TEXT: dict[str, Any] = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64,
                        "num_hidden_layers": 2, "num_attention_heads": 4}  # fmt: skip
DECODER = {**TEXT, "num_key_value_heads": 2}
IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 32,
                         "intermediate_size": 64, "num_hidden_layers": 2,
                         "num_attention_heads": 4}  # fmt: skip
PYRAMID: dict[str, Any] = {"hidden_sizes": [16, 32], "depths": [1, 1]}

CASES: dict[str, Case] = {
    "TransformerEncoderLayer": plain(
        lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 10, 32)
    ),
    "Transformer": plain(
        lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True), (2, 10, 32), (2, 6, 32)
    ),
    "MultiheadAttention": plain(
        lambda: nn.MultiheadAttention(32, 4, batch_first=True), *[(2, 9, 32)] * 3
    ),
    "ConvBnReluPool": plain(
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 3, 33, 35),
    ),
    "ConvTransposeGroupNorm": plain(
        lambda: nn.Sequential(nn.ConvTranspose2d(8, 16, 2, 2), nn.GroupNorm(4, 16), nn.SiLU()),
        (2, 8, 9, 11),
    ),
    "Conv1dInstanceNorm": plain(
        lambda: nn.Sequential(nn.Conv1d(8, 16, 3), nn.InstanceNorm1d(16), nn.Mish()), (2, 8, 40)
    ),
    "Conv3dBatchNorm": plain(
        lambda: nn.Sequential(nn.Conv3d(2, 8, 3), nn.BatchNorm3d(8), nn.ELU()), (2, 2, 8, 9, 10)
    ),
    "MlpLayerNorm": plain(
        lambda: nn.Sequential(nn.Linear(20, 40), nn.LayerNorm(40), nn.GELU(), nn.Linear(40, 5)),
        (7, 20),
    ),
    "BertModel": hub("BertModel", "BertConfig", **TEXT),
    "RobertaModel": hub("RobertaModel", "RobertaConfig", **TEXT),
    "ElectraModel": hub("ElectraModel", "ElectraConfig", embedding_size=32, **TEXT),
    "GPT2LMHeadModel": hub(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_embd=32, n_layer=2, n_head=4,
        bos_token_id=1, eos_token_id=1,
    ),
    "GPTNeoXForCausalLM": hub("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT),
    "LlamaForCausalLM": hub("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "MistralForCausalLM": hub("MistralForCausalLM", "MistralConfig", **DECODER),
    "Qwen2ForCausalLM": hub("Qwen2ForCausalLM", "Qwen2Config", **DECODER),
    "GemmaForCausalLM": hub("GemmaForCausalLM", "GemmaConfig", head_dim=8, pad_token_id=0,
                            **DECODER),
    "ResNetModel": hub("ResNetModel", "ResNetConfig", embedding_size=8, **PYRAMID),
    "ConvNextModel": hub("ConvNextModel", "ConvNextConfig", num_stages=2, **PYRAMID),
    "ViTModel": hub("ViTModel", "ViTConfig", **IMAGE),
    "DeiTModel": hub("DeiTModel", "DeiTConfig", **IMAGE),
    "RegNetModel": hub("RegNetModel", "RegNetConfig", embedding_size=8, groups_width=8, **PYRAMID),
    "MobileNetV2Model": hub("MobileNetV2Model", "MobileNetV2Config", depth_multiplier=0.25,
                            image_size=32),
}  # fmt: skip
WHOLE = tuple((name, dynamic) for name in CASES for dynamic in (None, True))
DEFAULT = (("TransformerEncoderLayer", True), ("ConvBnReluPool", None))
CHOSEN = WHOLE if os.environ.get("PT214_FOREIGN") == "all" else DEFAULT
HUB = [name for name in CASES if name.endswith(("Model", "LM"))]


def results(model: Any, args: Any, kwargs: Any, grad: bool) -> list[torch.Tensor]:
    """Floating outputs, and with ``grad`` every parameter's gradient of their sum of squares."""
    from torch.utils import _pytree

    torch.manual_seed(1)
    with torch.set_grad_enabled(grad):
        output = model(*args, **kwargs)
        output = output.to_tuple() if hasattr(output, "to_tuple") else output
        leaves = [t for t in _pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
        found = [t for t in leaves if t.is_floating_point()]
        if grad:
            model.zero_grad()
            loss = torch.stack([(t**2).mean() for t in found if t.requires_grad]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [t.detach() for t in found]


@pytest.mark.filterwarnings("default")  # the models' own warnings are theirs
@pytest.mark.parametrize(
    ("name", "dynamic"), CHOSEN, ids=[f"{name}-{'dynamic' if d else 'auto'}" for name, d in CHOSEN]
)
def test_outputs_and_gradients_are_eagers(name: str, dynamic: bool | None) -> None:
    if name in HUB and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    model.eval()
    compiled = torch.compile(
        model, backend=compile_fx, dynamic=dynamic, options={"pt214.strict": True}
    )
    for grad in (False, True):
        wanted = results(model, args, kwargs, grad)
        got = results(compiled, args, kwargs, grad)
        assert len(wanted) > 0
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)
