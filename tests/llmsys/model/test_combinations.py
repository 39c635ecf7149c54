"""Every combination that a model section can say builds without memory, with the tensors of the
estimate, and runs.
"""

from itertools import product
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from llmsys.config.model import ModelConfig
from llmsys.estimate.model_tensors import count_parameters
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from tests.helpers.model_choices import (
    ARCHITECTURES,
    BUCKETS,
    LATENT,
    SLIDING,
    build_choice_config,
    build_source,
)
from tests.helpers.tiny_model import build_tiny_config, build_tiny_tokens, compute_relative_error

RESIDUALS = [
    {"kind": kind} | more
    for kind, more in [
        ("pre", {}),
        ("post", {}),
        ("deepnorm", {"final_norm": True}),
        ("sandwich", {}),
        ("output", {}),
        ("parallel", {}),
        ("parallel", {"norms": 2}),
    ]
]
POSITIONS = [
    {"kind": kind} for kind in ("rope", "learned", "sinusoidal", "alibi", "transformer_xl", "none")
] + [BUCKETS]
ATTENTIONS = [
    {"kind": "multi_head"},
    {
        "kind": "multi_head",
        "sinks": True,
        "logit_softcap": 4.0,
        "qk_norm": "full",
        "qkv_bias": True,
    },
    LATENT,
]
HEADS = {"decoder": "lm", "encoder": "mlm", "encoder_decoder": "lm"}


def legal(**changes: Any) -> ModelConfig | None:
    try:
        return build_tiny_config(num_key_value_heads=4, **changes)
    except ValidationError:
        return None


@pytest.mark.parametrize("family", HEADS)
@pytest.mark.parametrize("attention", ATTENTIONS, ids=["plain", "all", "latent"])
@torch.no_grad()
def test_every_combination_builds_and_runs(family: str, attention: dict[str, Any]) -> None:
    shared = {
        "family": family,
        "attention": attention,
        "head": {"kind": HEADS[family]},
        "num_hidden_layers": 1,
    }
    ran = 0
    for residual, position, more in product(
        RESIDUALS, POSITIONS, [{}, SLIDING | {"layer_types": []}]
    ):
        config = legal(residual=residual, position=position, **shared, **more)
        if config is None:
            continue
        with torch.device("meta"):
            model = Transformer(config)
        assert sum(p.numel() for p in model.parameters()) == count_parameters(config).total
        model.to_empty(device="cpu")
        initialize_parameters(model, seed=0)
        assert (
            model(build_tiny_tokens(1, 4), **{k: v[:1] for k, v in build_source(config).items()})
            .isfinite()
            .all()
        )
        ran += 1
    assert ran >= 14


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ties_and_casts_survive_the_meta_device(name: str) -> None:
    config = build_choice_config(name)
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device="cpu")
    initialize_parameters(model, seed=0)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    if config.head.kind in ("lm", "mlm"):
        assert (model.head.weight is model.embed.weight) is config.tie_word_embeddings
    exact = model(build_tiny_tokens(), **build_source(config))
    rounded = model.bfloat16()(build_tiny_tokens(), **build_source(config))
    assert rounded.dtype == torch.bfloat16
    assert compute_relative_error(rounded, exact) < 0.1


@torch.no_grad()
def test_a_tied_encoder_decoder_has_one_matrix_for_source_target_and_head() -> None:
    model = Transformer(build_choice_config("original"))
    assert [name for name, p in model.named_parameters() if p.shape == (37, 16)] == ["embed.weight"]


def test_windows_of_an_encoder_decoder_are_the_decoders() -> None:
    model = Transformer(build_tiny_config(family="encoder_decoder", sliding_window=2))
    assert model.shared.masks.windows == {"sliding_attention": 2}
    assert model.encoder.shared.masks.windows == {"full_attention": None}


def test_dropout_works_in_training_alone() -> None:
    places = ("embedding", "residual", "attention", "activation", "final")
    for place in places:
        model = Transformer(build_tiny_config(dropout={place: 0.4}))
        initialize_parameters(model, seed=0)
        torch.manual_seed(0)
        first, second = model(build_tiny_tokens()), model(build_tiny_tokens())
        assert not torch.equal(first, second), place
        model.eval()
        assert torch.equal(model(build_tiny_tokens()), model(build_tiny_tokens())), place
