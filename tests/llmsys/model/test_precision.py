"""bfloat16 stays close to float32, long sums are kept in float32, and the same run gives the
same bits.
"""

import pytest
import torch

from llmsys.config.position import RelativeBiasConfig
from llmsys.errors import ConfigError
from llmsys.model.embedding import RelativePositionBias, TokenEmbedding
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)

BIG = {
    "hidden_size": 64,
    "vocab_size": 101,
    "max_position_embeddings": 160,
    "initializer_range": 0.1,
}


def run(model: Transformer, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    model.zero_grad()
    logits = model(tokens, documents_BT=torch.arange(tokens.shape[1]).expand_as(tokens) // 50)
    weights = torch.randn(logits.shape, generator=generator)
    (logits.float() * weights).mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return {"logits": logits.detach()} | gradients


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_bfloat16_is_close_to_float32(norm: str) -> None:
    # Routed to all experts, so that rounding cannot choose another one.
    config = build_tiny_moe_config(
        {"num_experts_per_tok": 4, "num_shared_experts": 1}, norm={"kind": norm}, **BIG
    )
    model, tokens = build_tiny_model(config), build_tiny_tokens(2, 150, 101)
    exact = run(model, tokens)
    rounded = run(model.bfloat16(), tokens)
    assert rounded["logits"].dtype == torch.bfloat16
    for name, value in exact.items():
        assert compute_relative_error(rounded[name], value) < 0.05, name


def test_buffers_stay_float32_to_the_bit_when_the_model_is_cast() -> None:
    model = build_tiny_model(build_tiny_moe_config())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.bfloat16().double().to(torch.bfloat16)
    assert len(before) == 12
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name]), name
    assert (
        model.list_moe_layers()[0].expert_tokens_E
        is dict(model.named_buffers())["blocks.0.feed_forward.expert_tokens_E"]
    )


def test_a_frequent_token_keeps_its_embedding_gradient_in_bfloat16() -> None:
    # Added up in bfloat16, 2,000 gradients of 1 stop at 256.
    embed = TokenEmbedding(3, 4).bfloat16()
    embed(torch.ones(2000, dtype=torch.int64)).sum().backward()
    assert embed.weight.grad is not None
    assert embed.weight.grad.dtype == torch.bfloat16
    assert (embed.weight.grad[1] == 2000).all()
    assert not embed.weight.grad[[0, 2]].any()


def test_a_frequent_distance_keeps_its_bias_gradient_in_bfloat16() -> None:
    table = RelativePositionBias(RelativeBiasConfig(), 2).bfloat16()
    places = torch.arange(300)
    table(places, places, bidirectional=True).sum().backward()
    assert table.weight.grad is not None
    # Distances of 91 and more have their last bucket in common on either side.
    assert float(table.weight.grad[15, 0]) == pytest.approx(
        sum(300 - d for d in range(91, 300)), rel=0.01
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_input_gives_the_same_bits(threads: int, dtype: torch.dtype) -> None:
    config = build_tiny_moe_config({"num_shared_experts": 1}, **BIG)
    # few distinct tokens: many rows add up in each embedding gradient
    tokens = build_tiny_tokens(4, 150, 5)
    model = build_tiny_model(config).to(dtype)
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first, second = run(model, tokens), run(model, tokens)
    finally:
        torch.set_num_threads(previous)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    message = (
        r"A sequence of 65 tokens exceeds model\.max_position_embeddings=64\. Use "
        r"batch\.sequence_length=64 or "
    )
    with pytest.raises(ConfigError, match=message):
        build_tiny_model(build_tiny_config())(build_tiny_tokens(1, 65))
