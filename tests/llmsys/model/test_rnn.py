"""What recurrent layers reject, and padding that no state depends on.

Outputs and gradients are compared with torch's layers in test_matches_reference.py, caches in
test_kv_cache.py.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llmsys.config.run import RunConfig
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from tests.helpers.model_choices import ARCHITECTURES, RECURRENT
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, build_tiny_tokens

LSTM = {"rnn": {"kind": "lstm"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "decoder"},
            "rnn.score: bilinear attends to a source, and family=decoder has none. Use none",
        ),
        (
            {"rnn": {"kind": "lstm", "score": "none"}},
            "rnn.input_feeding: true feeds the attended state, and rnn.score=none attends to",
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


ALONE = {"score": "none", "input_feeding": False}
LAYERS = {"elman": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
SIDES = {"input_proj": "ih", "state_proj": "hh"}


def load_torch_layers(model: Transformer, kind: str) -> torch.nn.RNNBase:
    """torch's layers with the weights of ours, in either or both directions."""
    names = [
        name
        for name in ("forward_cells", "backward_cells")
        if f"blocks.0.{name}.0.input_proj.weight" in dict(model.named_parameters())
    ]
    width = model.config.hidden_size
    layers = LAYERS[kind](
        width,
        width // max(1, len(names)),
        model.config.num_hidden_layers,
        batch_first=True,
        bidirectional=bool(names),
    )
    weights = dict(model.named_parameters())
    for suffix, name in enumerate(names or ["cells"]):
        for layer in range(model.config.num_hidden_layers):
            for side, theirs in SIDES.items():
                for what in ("weight", "bias"):
                    key = f"{what}_{theirs}_l{layer}{'_reverse' if suffix else ''}"
                    value = weights[f"blocks.0.{name}.{layer}.{side}.{what}"]
                    getattr(layers, key).data.copy_(value.data)
    return layers


@pytest.mark.parametrize("family", ["decoder", "encoder"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_without_a_source_are_those_of_torch(kind: str, family: str) -> None:
    head = {"head": {"kind": "mlm"}} if family == "encoder" else {}
    config = build_tiny_config(
        **RECURRENT
        | {"family": family, "rnn": {"kind": kind} | ALONE, "num_hidden_layers": 3}
        | head
    )
    model = build_tiny_model(config)
    layers = load_torch_layers(model, kind)
    tokens = build_tiny_tokens()
    embedded_BTD = F.embedding(tokens, model.get_parameter("embed.weight")).detach()
    ours, _ = model.run_blocks(embedded_BTD)
    theirs, _ = layers(embedded_BTD)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    factors = torch.randn_like(theirs)
    (ours * factors).sum().backward()
    (theirs * factors).sum().backward()
    name = "forward_cells" if family == "encoder" else "cells"
    for layer in range(3):
        mine = model.get_parameter(f"blocks.0.{name}.{layer}.state_proj.weight").grad
        torch.testing.assert_close(
            mine, getattr(layers, f"weight_hh_l{layer}").grad, rtol=1e-4, atol=1e-5
        )


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
def test_a_language_model_continues_from_its_cache(kind: str) -> None:
    config = build_tiny_config(**RECURRENT | {"family": "decoder", "rnn": {"kind": kind} | ALONE})
    model, tokens = build_tiny_model(config).eval(), build_tiny_tokens()
    cache = KeyValueCache(config, *tokens.shape)
    parts = [model(tokens[:, :3], cache=cache)]
    parts += [model(tokens[:, at : at + 1], cache=cache) for at in range(3, tokens.shape[1])]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))


def test_a_decoder_reads_windows_as_one_text() -> None:
    model = build_tiny_config(**RECURRENT | {"family": "decoder", "rnn": {"kind": "gru"} | ALONE})
    with pytest.raises(ValueError, match=r"document is not kept by model.rnn.kind=gru"):
        RunConfig.model_validate({"model": model, "batch": {"attention_scope": "document"}})
    for axis in ("tensor", "context", "pipeline"):
        with pytest.raises(ValueError, match=f"layout.{axis}: 2 ranks would share cells"):
            RunConfig.model_validate(
                {"model": model, "batch": {"attention_scope": "window"}, "layout": {axis: 2}}
            )
