"""The model equals its formulas, computed one position, head, token and expert at a time: output
and every gradient.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from tests.helpers.model_choices import ARCHITECTURES, DECODERS, build_choice_config, build_source
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)
from tests.reference import transformer as reference

DOCUMENTS = torch.tensor([[3, 3, 3, 4, 4, 9, 9], [0, 1, 1, 1, 1, 1, 2]])
TYPES = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0]])

MIXTURES = {
    "experts, bias": {},
    "experts, all of it": {
        "num_shared_experts": 2,
        "first_dense_layers": 1,
        "score": "sigmoid",
        "routed_scaling_factor": 2.5,
        "num_experts_per_tok": 3,
    },
    "experts, bare softmax": {"norm_topk_prob": False, "balance": {"kind": "none"}},
    "experts, bare sigmoid": {"norm_topk_prob": False, "score": "sigmoid"},
    "every expert": {"num_experts_per_tok": 4, "balance": {"kind": "auxiliary_loss"}},
}
CONFIGS = {name: build_choice_config(name) for name in ARCHITECTURES}
CONFIGS |= {name: build_tiny_moe_config(experts) for name, experts in MIXTURES.items()}


def check(config: ModelConfig, documents: Tensor | None) -> None:
    model, tokens, source = build_tiny_model(config), build_tiny_tokens(), build_source(config)
    types = TYPES if config.embedding.token_types else None

    def compute(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
        with errors:
            output = model(tokens, documents_BT=documents, token_types_BT=types, **source)
            weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
            gradients = torch.autograd.grad((output * weights).sum(), list(named.values()))
        return {"output": output.detach()} | dict(zip(named, gradients, strict=True))

    named = dict(model.named_parameters())
    found = compute(contextlib.nullcontext())
    twin = {name: p.detach().double().requires_grad_() for name, p in named.items()}
    buffers = {name: buffer.double() for name, buffer in model.named_buffers()}
    output = reference.output(
        config, twin | buffers, tokens, documents, *source.values(), types=types
    )
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5))
    (output * weights).sum().backward()
    gradients = {name: p.grad for name, p in twin.items() if p.grad is not None}
    # Separately: the size of an output says nothing about that of gradients.
    assert_within_rounding({"output": found.pop("output")}, {"output": output.detach()}, compute)
    assert_within_rounding(found, gradients, compute)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_output_and_gradients_equal_the_formulas(config: ModelConfig) -> None:
    # Targets of a document that no source has would see nothing, so an encoder-decoder is packed
    # further below.
    check(config, None if config.family == "encoder_decoder" else DOCUMENTS)


@pytest.mark.parametrize(
    "name", ["llama", "alibi", "sinks, windows", "latent", "transformer_xl", "bert"]
)
def test_one_document_needs_no_numbers(name: str) -> None:
    check(build_choice_config(name), None)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@torch.no_grad()
def test_equal_numbers_are_as_good_as_none(config: ModelConfig) -> None:
    model, tokens, source = (
        build_tiny_model(config).eval(),
        build_tiny_tokens(),
        build_source(config),
    )
    numbered = model(tokens, documents_BT=torch.zeros_like(tokens), **source)
    assert compute_relative_error(model(tokens, **source), numbered) < 1e-5


@pytest.mark.parametrize(
    "config", [build_tiny_config(), build_tiny_moe_config()], ids=["dense", "experts"]
)
def test_a_token_sees_neither_later_tokens_nor_other_documents(config: ModelConfig) -> None:
    model, tokens = build_tiny_model(config), build_tiny_tokens()
    changed = tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 37
    # Not to the bit: a matrix product may round a row differently when other rows go to its expert.
    plain, plain_changed = model(tokens), model(changed)
    torch.testing.assert_close(plain[:, :4], plain_changed[:, :4], rtol=1e-5, atol=1e-5)
    assert ((plain - plain_changed)[:, 4:].abs().amax(-1) > 1e-3).all()
    packed, packed_changed = (model(x, documents_BT=DOCUMENTS) for x in (tokens, changed))
    torch.testing.assert_close(packed[0, 5:], packed_changed[0, 5:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[1, 6:], packed_changed[1, 6:], rtol=1e-5, atol=1e-5)


# Segments are cut in the row, not in its documents.
PACKED = [name for name in DECODERS if not name.startswith("segments")]


@pytest.mark.parametrize(
    "name", [*PACKED, "rope encoder", "alibi encoder", "t5 encoder", "xlnet", "bert"]
)
@torch.no_grad()
def test_a_packed_document_reads_as_if_it_were_alone(name: str) -> None:
    model, tokens = build_tiny_model(build_choice_config(name)).eval(), build_tiny_tokens()
    packed = model(tokens, documents_BT=DOCUMENTS)
    for row, first, last in [(0, 0, 3), (0, 3, 5), (1, 1, 6), (1, 6, 7)]:
        alone = model(tokens[row : row + 1, first:last])
        assert compute_relative_error(packed[row : row + 1, first:last], alone) < 1e-5


@pytest.mark.parametrize("name", ["original", "t5", "sandwich, xl"])
@torch.no_grad()
def test_a_packed_pair_reads_as_if_it_were_alone(name: str) -> None:
    model, tokens, source = (
        build_tiny_model(build_choice_config(name)).eval(),
        build_tiny_tokens(),
        build_tiny_tokens(2, 6, seed=8),
    )
    numbers = torch.tensor([[3, 3, 4, 4, 4, 9], [1, 1, 0, 0, 2, -1]])
    packed = model(tokens, documents_BT=DOCUMENTS, source_BS=source, source_documents_BS=numbers)
    for row, (first, last), places in [
        (0, (3, 5), [2, 3, 4]),
        (1, (1, 6), [0, 1]),
        (1, (0, 1), [2, 3]),
    ]:
        alone = model(tokens[row : row + 1, first:last], source_BS=source[row : row + 1, places])
        assert compute_relative_error(packed[row : row + 1, first:last], alone) < 1e-5


PADDED = [
    (name, side)
    for name in ("bert", "rope encoder", "t5 encoder", "xlnet")
    for side in ("left", "right")
]


@pytest.mark.parametrize(("name", "side"), [*PADDED, ("bert classifier", "right")])
@torch.no_grad()
def test_padding_changes_nothing_in_an_encoder(name: str, side: str) -> None:
    model, tokens = build_tiny_model(build_choice_config(name)).eval(), build_tiny_tokens()
    padding, numbers = build_tiny_tokens(2, 3, seed=4), torch.zeros(2, 7)
    parts = [(tokens, numbers), (padding, numbers[:, :3] - 1)]
    both = list(zip(*(parts if side == "right" else parts[::-1]), strict=True))
    padded = model(torch.cat(both[0], 1), documents_BT=torch.cat(both[1], 1))
    if padded.dim() == 3:
        padded = padded[:, :7] if side == "right" else padded[:, 3:]
    assert compute_relative_error(padded, model(tokens)) < 1e-5
