"""Compiled blocks give the values and gradients of plain ones. (The backend is torch's own, without a C++ compiler.)"""

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.parallel.parallelize import compile_blocks
from tests.helpers.tiny_model import tiny_model, tiny_moe_config, tiny_tokens


def values(model: Transformer, tokens: torch.Tensor) -> list[torch.Tensor]:
    logits = model(tokens)
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
    expected = values(model, tokens)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")
    for value, true in zip(values(model, tokens), expected, strict=True):
        torch.testing.assert_close(value, true)
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] >= 1
    assert frames["ok"] == frames["total"]


def test_experts_agree_in_bfloat16() -> None:
    model = tiny_model(tiny_moe_config({"num_shared_experts": 1})).bfloat16().train()
    tokens = tiny_tokens(2, 8, 37)
    expected = values(model, tokens)
    torch._dynamo.reset()
    compile_blocks(model, backend="aot_eager")
    for value, true in zip(values(model, tokens), expected, strict=True):
        torch.testing.assert_close(value.float(), true.float(), rtol=2e-2, atol=2e-3)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # equal blocks share it


@pytest.fixture(autouse=True)
def _afresh() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
