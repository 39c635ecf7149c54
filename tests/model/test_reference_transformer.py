"""The model equals its formulas, computed one position, head, token and expert at a time: logits and every gradient."""

import pytest
import torch

from llmsys.config.model import ModelConfig
from tests.helpers.tiny_model import relative_error, tiny_config, tiny_model, tiny_moe_config, tiny_tokens
from tests.reference import transformer as reference

DOCUMENTS = torch.tensor([[3, 3, 3, 4, 4, 9, 9], [0, 1, 1, 1, 1, 1, 2]])

CONFIGS = {
    "dense": tiny_config(),
    "tied": tiny_config(tie_word_embeddings=True),
    "one key-value head, wide heads": tiny_config(num_key_value_heads=1, head_dim=6),
    "layernorm, gelu, no position": tiny_config(
        norm={"kind": "layernorm"}, feed_forward={"kind": "gelu"}, position={"kind": "none"}
    ),
    "relu, own theta": tiny_config(feed_forward={"kind": "relu"}, position={"kind": "rope", "theta": 50.0}),
    "experts, bias": tiny_moe_config(),
    "experts, all of it": tiny_moe_config(
        {
            "num_shared_experts": 2,
            "first_dense_layers": 1,
            "score": "sigmoid",
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 3,
        }
    ),
    "experts, bare softmax": tiny_moe_config({"norm_topk_prob": False, "balance": {"kind": "none"}}),
    "experts, bare sigmoid": tiny_moe_config({"norm_topk_prob": False, "score": "sigmoid"}),
    "every expert": tiny_moe_config({"num_experts_per_tok": 4, "balance": {"kind": "auxiliary_loss"}}),
}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["causal", "documents"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_gradients_equal_the_formulas(config: ModelConfig, documents: torch.Tensor | None) -> None:
    model, tokens = tiny_model(config), tiny_tokens()
    weights = torch.randn(2, 7, config.vocab_size, generator=torch.Generator().manual_seed(5))
    logits = model(tokens, documents_BT=documents)
    (logits * weights).sum().backward()

    twin = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    buffers = {name: buffer.double() for name, buffer in model.named_buffers()}
    expected = reference.logits(config, twin | buffers, tokens, documents)
    (expected * weights).sum().backward()

    assert relative_error(logits, expected) < 1e-5
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert relative_error(parameter.grad, twin[name].grad) < 1e-5, name


@pytest.mark.parametrize("config", [tiny_config(), tiny_moe_config()], ids=["dense", "experts"])
def test_a_token_sees_neither_later_tokens_nor_other_documents(config: ModelConfig) -> None:
    model, tokens = tiny_model(config), tiny_tokens()
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 37
    # Not to the bit: a matrix product may round a row differently when other rows go to its expert.
    plain, plain_changed = model(tokens), model(changed)
    torch.testing.assert_close(plain[:, :4], plain_changed[:, :4], rtol=1e-5, atol=1e-5)
    assert ((plain - plain_changed)[:, 4:].abs().amax(-1) > 1e-3).all()
    packed, packed_changed = (model(x, documents_BT=DOCUMENTS) for x in (tokens, changed))
    torch.testing.assert_close(packed[0, 5:], packed_changed[0, 5:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[1, 6:], packed_changed[1, 6:], rtol=1e-5, atol=1e-5)


def test_a_packed_document_reads_as_if_it_were_alone() -> None:
    # RoPE scores depend on distances only, so a document may stand anywhere in its window.
    model, tokens = tiny_model(tiny_moe_config()), tiny_tokens()
    packed = model(tokens, documents_BT=DOCUMENTS)
    alone = model(tokens[:1, 3:5])
    torch.testing.assert_close(packed[:1, 3:5], alone, rtol=1e-4, atol=1e-5)
