"""Longformer and Linformer: against their formulas, Longformer against transformers, and what they
reject.

Longformer is one of the architectures of test_matches_reference.py too, with packed documents and
dilated windows.
"""

from typing import Any

import pytest
import torch

from llmsys.config.loading.load import load_model_config
from llmsys.config.run import RunConfig
from llmsys.estimate.model_tensors import count_parameters
from llmsys.model.scaled_dot_product import compute_attention
from tests.helpers.model_choices import BERT
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_tokens,
    compute_relative_error,
)
from tests.llmsys.model.test_matches_reference import check

transformers = pytest.importorskip("transformers")

PADDED = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, -1, -1, -1]])
LINFORMER: dict[str, Any] = BERT | {"head": {"kind": "mlm"}, "max_position_embeddings": 9}


@pytest.mark.parametrize(
    ("sharing", "position"),
    [("none", "rope"), ("heads", "learned"), ("key_value", "rope"), ("layers", "learned")],
)
def test_linformer_equals_its_formulas(sharing: str, position: str) -> None:
    """Grouped heads, rows shorter than the mixture, and padding, which has no weight in it."""
    attention = {
        "kind": "linformer",
        "projected_length": 3,
        "sharing": sharing,
        "qkv_bias": position == "learned",
    }
    changes = {"attention": attention, "position": {"kind": position}, "num_key_value_heads": 2}
    check(build_tiny_config(**LINFORMER | changes), PADDED)


def test_longformer_equals_transformers() -> None:
    """Windows, two global tokens with their projections, and padding: hidden states and every
    gradient.
    """
    length, window, tokens = 24, 8, 2
    config = transformers.LongformerConfig(
        vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=66, attention_window=[window, window // 2], type_vocab_size=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=1, initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.LongformerModel(config, add_pooling_layer=False).train()
    attention = {
        "kind": "longformer", "windows": [window, window // 2], "num_global_tokens": tokens,
        "qkv_bias": True,
        "output_bias": True,
    }  # fmt: skip
    ours = build_tiny_model(
        build_tiny_config(
            **BERT
            | {
                "head": {"kind": "features"},
                "attention": attention,
                "position": {"kind": "learned", "offset": 2},
            }
            | {"norm": {"kind": "layernorm", "eps": config.layer_norm_eps}}
        )
    ).train()
    named = {map_name(name): parameter for name, parameter in theirs.named_parameters()}
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(named[name])
    assert named.keys() == dict(ours.named_parameters()).keys()

    tokens_BT, real_BT = (
        build_tiny_tokens(2, length) % 35 + 2,
        torch.ones(2, length, dtype=torch.int64),
    )
    real_BT[1, -5:] = 0
    is_global_BT = (torch.arange(length) < tokens).long().expand(2, -1)
    padded_BT = torch.where(real_BT == 1, tokens_BT, 1)
    expected = theirs(
        padded_BT, attention_mask=real_BT, global_attention_mask=is_global_BT
    ).last_hidden_state
    found = ours(padded_BT, documents_BT=real_BT - 1)
    is_real_BT = real_BT == 1
    assert compute_relative_error(found[is_real_BT], expected[is_real_BT]) < 1e-5
    weights = torch.randn(found[is_real_BT].shape, generator=torch.Generator().manual_seed(1))
    (found[is_real_BT] * weights).sum().backward()
    (expected[is_real_BT] * weights).sum().backward()
    for name, parameter in ours.named_parameters():
        largest = max(float(one.grad.norm()) for one in named.values())
        error = float((parameter.grad - named[name].grad).norm()) / max(
            float(named[name].grad.norm()), 1e-2 * largest
        )
        assert error < 1e-5, name


def map_name(name: str) -> str:
    """Return our name of a parameter of transformers' Longformer."""
    for old, new in {
        "embeddings.word_embeddings": "embed", "embeddings.position_embeddings": "positions",
        "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "embedding_norm",
        "encoder.layer.": "blocks.", "attention.self.query_global": "attention.global_q_proj",
        "attention.self.key_global": "attention.global_k_proj",
        "attention.self.value_global": "attention.global_v_proj",
        "attention.self.query": "attention.q_proj",
        "attention.self.key": "attention.k_proj", "attention.self.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "feed_forward.up_proj", "output.dense": "feed_forward.down_proj",
        "output.LayerNorm": "feed_forward_norm",
    }.items():  # fmt: skip
        name = name.replace(old, new)
    return name


@torch.no_grad()
@pytest.mark.parametrize("kind", ["longformer", "linformer"])
def test_memory_grows_with_the_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of positions × positions is made, with documents or without."""
    attention = {"kind": kind} | (
        {"windows": [8]} if kind == "longformer" else {"projected_length": 8}
    )
    model = build_tiny_model(
        build_tiny_config(**LINFORMER | {"attention": attention, "max_position_embeddings": 512})
    )
    pairs: list[int] = []

    def record(q: Any, k: Any, v: Any, mask: Any, **rest: Any) -> Any:
        pairs.append(q.shape[0] * q.shape[1] * k.shape[1])
        return compute_attention(q, k, v, mask, **rest)

    monkeypatch.setattr("llmsys.model.long_attention.compute_attention", record)
    monkeypatch.setattr("llmsys.model.multi_head_attention.compute_attention", record)
    sums = []
    for length in (256, 512):
        pairs.clear()
        model(build_tiny_tokens(1, length), documents_BT=torch.zeros(1, length, dtype=torch.int64))
        sums.append(sum(pairs))
    assert sums[1] == 2 * sums[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "encoder_decoder", "head": {"kind": "lm"}},
            "so family=encoder_decoder cannot use it",
        ),
        ({"sliding_window": 4}, "chooses its keys itself. Leave it out"),
        ({"position": {"kind": "alibi"}}, "alibi is no position of attention.kind="),
    ],
)
@pytest.mark.parametrize("kind", ["longformer", "linformer"])
def test_what_does_not_fit_is_rejected(kind: str, changes: dict[str, Any], message: str) -> None:
    values = LINFORMER | {"attention": {"kind": kind}} | changes
    if "family" in changes:
        values |= {"embedding": {"norm": True}}
    with pytest.raises(ValueError, match=message):
        build_tiny_config(**values)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
@pytest.mark.parametrize("kind", ["longformer", "linformer"])
def test_axes_that_cannot_split_it_are_rejected(kind: str, axis: str) -> None:
    model = build_tiny_config(**LINFORMER | {"attention": {"kind": kind}})
    with pytest.raises(
        ValueError, match=rf"layout.{axis}: model.attention.kind={kind} (needs full|does not run)"
    ):
        RunConfig.model_validate({"model": model, "layout": {axis: 2}})


def test_a_decoder_has_windows_without_global_tokens_and_no_mixtures() -> None:
    decoder = LINFORMER | {"family": "decoder", "head": {"kind": "lm"}, "embedding": {"norm": True}}
    with pytest.raises(
        ValueError, match=r"1 would see later tokens, which family=decoder predicts\. Use 0"
    ):
        build_tiny_config(**decoder | {"attention": {"kind": "longformer"}})
    with pytest.raises(ValueError, match="linformer is bidirectional, so family=decoder cannot"):
        build_tiny_config(**decoder | {"attention": {"kind": "linformer"}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"windows": [5]}, "5 has no two halves. Use 6"),
        ({"dilations": [0]}, "0 is no distance. Use 1 or more"),
    ],
)
def test_windows_have_two_halves_and_dilations_a_distance(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_tiny_config(**LINFORMER | {"attention": {"kind": "longformer"} | fields})


def test_linformer_cannot_keep_documents_of_a_window_apart() -> None:
    model = build_tiny_config(**LINFORMER | {"attention": {"kind": "linformer"}})
    with pytest.raises(
        ValueError, match=r"document is not kept by model\.attention\.kind=linformer"
    ):
        RunConfig.model_validate(
            {"model": model, "batch": {"sequence_length": 8, "attention_scope": "document"}}
        )
    RunConfig.model_validate(
        {"model": model, "batch": {"sequence_length": 8, "attention_scope": "window"}}
    )


@pytest.mark.parametrize(("name", "build"), [("longformer-base", "LongformerForMaskedLM")])
def test_a_named_model_has_the_parameters_of_transformers(name: str, build: str) -> None:
    config = transformers.LongformerConfig(
        vocab_size=50265, max_position_embeddings=4098, type_vocab_size=1
    )
    with torch.device("meta"):
        theirs = getattr(transformers, build)(config)
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    assert count_parameters(load_model_config(f"model/{name}")).total == expected
