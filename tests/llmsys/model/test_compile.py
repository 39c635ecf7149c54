"""Compiled blocks give the values and gradients of plain ones. (The backend is torch's own,
without a C++ compiler.)
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import flex_attention

from llmsys.config.model import ModelConfig
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.parallel import block_compilation
from llmsys.parallel.block_compilation import compile_blocks
from tests.helpers.model_choices import ARCHITECTURES
from tests.helpers.pretended_accelerator import pretend_accelerator
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
)


def values(
    forward: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, model: Transformer
) -> list[torch.Tensor]:
    logits = forward(tokens)
    gradients = torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))
    return [logits, *gradients]


def test_a_dense_model_is_compiled_whole_and_agrees() -> None:
    config = ModelConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention={"kind": "multi_head", "qk_norm": "head"},
    )
    model = Transformer(config)
    initialize_parameters(model, seed=1)
    tokens = torch.randint(0, 101, (2, 9))
    expected = values(model, tokens, model)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")
    for value, true in zip(values(model, tokens, model), expected, strict=True):
        torch.testing.assert_close(value, true)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] >= 1
    assert frames["ok"] == frames["total"]


def test_experts_agree_in_bfloat16() -> None:
    model = build_tiny_model(build_tiny_moe_config({"num_shared_experts": 1})).bfloat16().train()
    tokens = build_tiny_tokens(2, 8, 37)
    expected = values(model, tokens, model)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")
    for value, true in zip(values(model, tokens, model), expected, strict=True):
        torch.testing.assert_close(value.float(), true.float(), rtol=2e-2, atol=2e-3)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # equal blocks share it


@pytest.mark.parametrize(("device", "graphs"), [("cpu", 2), ("cuda", 1)])
def test_parallel_branches_that_end_in_biases_are_compiled_apart_on_a_processor(
    device: str, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_compilation, "get_local_device", lambda: torch.device(device))
    config = build_tiny_config(
        residual={"kind": "parallel"},
        attention={"kind": "multi_head", "output_bias": True},
        feed_forward={"kind": "silu", "bias": True},
    )
    model = build_tiny_model(config).bfloat16().train()
    tokens = build_tiny_tokens(2, 8)
    expected = values(model, tokens, model)
    compile_blocks(model, backend="aot_eager")
    for value, true in zip(values(model, tokens, model), expected, strict=True):
        torch.testing.assert_close(value.float(), true.float(), rtol=2e-2, atol=2e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


KERNELS = [
    "llama",
    "windows, own theta",
    "sinks, windows",
    "softcap, windows",
    "alibi",
    "relative bias",
    "latent",
]
PACKED = torch.tensor([[0] * 5 + [1] * 3, [2] * 8])


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_accelerators_agree_and_other_documents_do_not_compile_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_accelerator(monkeypatch, exact=True)
    # refuses gradients on CPUs
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    width = {} if name == "latent" else {"head_dim": 8}
    model, tokens = (
        build_tiny_model(build_tiny_config(**ARCHITECTURES[name] | width)),
        build_tiny_tokens(2, 8),
    )
    steps = [PACKED, PACKED.flip(0), torch.where(PACKED == 2, torch.arange(8) // 4, PACKED)]
    expected = [values(lambda x, d=d: model(x, documents_BT=d), tokens, model) for d in steps]
    compile_blocks(model, backend="aot_eager")
    graphs = []
    for documents_BT, true in zip(steps, expected, strict=True):
        found = values(lambda x, d=documents_BT: model(x, documents_BT=d), tokens, model)
        for value, reference in zip(found, true, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[2] == graphs[1] == graphs[0]


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
