"""What recurrent layers reject, and padding that no state depends on.

Outputs and gradients are compared with torch's layers in test_matches_reference.py, caches in
test_kv_cache.py.
"""

from typing import Any

import pytest
import torch

from llmsys.config.run import RunConfig
from tests.helpers.model_choices import ARCHITECTURES, RECURRENT
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, build_tiny_tokens

LSTM = {"rnn": {"kind": "lstm"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "decoder"},
            r"rnn.kind=lstm needs encoder_decoder, not decoder. Use encoder_decoder, or rnn=null",
        ),
        (
            {"position": {"kind": "sinusoidal"}},
            "position.kind: rnn.kind=lstm needs none, not sinusoidal",
        ),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 2},
            "num_attention_heads: rnn.kind=lstm needs 1, not 2",
        ),
        (
            {"hidden_size": 15},
            r"15 is odd, but each direction of rnn.kind=lstm has half of the channels. Use 16",
        ),
        (
            {"intermediate_size": 24},
            "intermediate_size: it belongs to blocks, and rnn.kind=lstm has none. Leave it",
        ),
        ({"norm": {"kind": "layernorm"}}, "norm: it belongs to blocks"),
        ({"recurrence": {"kind": "fixed"}}, "recurrence: it belongs to blocks"),
        ({"dropout": {"attention": 0.1}}, "dropout.attention: it belongs to blocks"),
        (
            {"encoder": {"num_hidden_layers": 1, "intermediate_size": 8}},
            "encoder.intermediate_size: it belongs to",
        ),
    ],
)
def test_what_belongs_to_blocks_is_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_tiny_config(**RECURRENT | LSTM | changes)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"train": {"activation_checkpoint": "full"}},
            "train.activation_checkpoint: full works on blocks, and model",
        ),
        (
            {"train": {"compile": "block"}},
            r"train.compile: block works on blocks, and model.rnn.kind=lstm has none",
        ),
        (
            {"engine": {"kind": "deepspeed", "zero_stage": 3}},
            "kind=lstm uses one at every position. Use zero_stage=2",
        ),
        (
            {"layout": {"tensor": 2}},
            r"layout.tensor: model.family=encoder_decoder needs full sequences on each rank",
        ),
        (
            {"layout": {"pipeline": 2}},
            "layout.pipeline: model.family=encoder_decoder does not run in stages",
        ),
    ],
)
def test_what_a_run_cannot_do_with_recurrent_layers_is_rejected(
    section: dict[str, Any], message: str
) -> None:
    model, batch = build_tiny_config(**RECURRENT | LSTM), {"sequence_length": 32, "tokens": 128}
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"model": model, "batch": batch} | section)


@pytest.mark.parametrize("name", ["lstm", "gru, additive, another encoder", "elman, not fed"])
@torch.no_grad()
def test_padding_of_a_source_changes_nothing(name: str) -> None:
    model = build_tiny_model(build_tiny_config(**ARCHITECTURES[name])).eval()
    tokens, source = build_tiny_tokens(), build_tiny_tokens(2, 4, seed=3)
    alone = model(tokens, source_BS=source)
    for rubbish in (0, 9):
        padded = torch.cat([source, torch.full((2, 3), rubbish)], 1)
        numbers = torch.tensor([[0] * 4 + [-1] * 3] * 2)
        torch.testing.assert_close(
            model(tokens, source_BS=padded, source_documents_BS=numbers), alone
        )


def test_a_row_of_padding_alone_has_finite_gradients() -> None:
    model = build_tiny_model(build_tiny_config(**ARCHITECTURES["lstm"])).train()
    hidden = torch.full((1, 1), -1)
    model(
        torch.zeros(1, 1, dtype=torch.long),
        source_BS=torch.zeros(1, 1, dtype=torch.long),
        source_documents_BS=hidden,
    ).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
