"""Multi-token prediction: each module's logits are the formulas', see no further than they may,
rest in inference.
"""

import pytest
import torch

from llmsys.config.model import ModelConfig
from tests.helpers.model_choices import LATENT
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)
from tests.reference import transformer as reference

TWO_MORE = {"multi_token_prediction": {"depth": 2}}
CONFIGS = {
    "dense": build_tiny_config(**TWO_MORE),
    "deepseek": build_tiny_moe_config(
        {"score": "sigmoid", "num_shared_experts": 1, "first_dense_layers": 1},
        attention=LATENT,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        **TWO_MORE,
    ),
    "sandwich, window": build_tiny_config(
        residual={"kind": "sandwich"}, sliding_window=3, **TWO_MORE
    ),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_and_gradients_of_every_module_equal_the_formulas(config: ModelConfig) -> None:
    model, tokens = build_tiny_model(config), build_tiny_tokens()
    logits = model(tokens)
    weights = [
        torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) for x in model.predicted
    ]
    assert [x.shape[1] for x in weights] == [6, 5]
    (
        logits.mean() + sum((x * w).sum() for x, w in zip(model.predicted, weights, strict=True))
    ).backward()

    twin = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    p = twin | {name: buffer.double() for name, buffer in model.named_buffers()}
    expected = [
        torch.stack(rows)
        for rows in zip(*(reference.predicted(config, p, row) for row in tokens), strict=True)
    ]
    total = sum((x * w).sum() for x, w in zip(expected, weights, strict=True))
    (total + reference.output(config, p, tokens).mean()).backward()
    for ours, theirs in zip(model.predicted, expected, strict=True):
        assert compute_relative_error(ours, theirs) < 1e-5
    for name, parameter in model.named_parameters():
        assert compute_relative_error(parameter.grad, twin[name].grad) < 1e-5, name


def test_a_module_sees_its_token_ahead_and_none_behind_it() -> None:
    model, tokens = build_tiny_model(CONFIGS["dense"]), build_tiny_tokens(1, 7)
    model(tokens)
    before = [x.detach() for x in model.predicted]
    tokens[:, 5] = (tokens[:, 5] + 1) % 37
    model(tokens)
    for k, (old, new) in enumerate(zip(before, model.predicted, strict=True), start=1):
        changed = (old - new).abs().amax(-1)[0] > 1e-6
        assert changed.tolist() == [t + k >= 5 for t in range(7 - k)]


@torch.no_grad()
def test_modules_rest_outside_of_training() -> None:
    model, tokens = build_tiny_model(CONFIGS["dense"]).eval(), build_tiny_tokens()
    with_modules = model(tokens)
    assert model.predicted == []
    plain = build_tiny_model(build_tiny_config())
    plain.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(plain(tokens), with_modules)
