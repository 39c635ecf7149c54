"""Reformer: hashed attention and reversible layers against transformers, and what they save,
generate and reject.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.lsh_attention import LshAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.model import layer_stack, reversible
from llmsys.model.initialization import initialize_parameters
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from tests.helpers.live_memory import measure_kept_bytes

LENGTH, CHUNK, HASHES = 24, 4, 2
REFORMER: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH, "initializer_range": 0.3, "position": {"kind": "learned"},
    "attention": {"kind": "lsh", "chunk_length": CHUNK, "num_hashes": HASHES},
    "residual": {"kind": "reversible"},
    "feed_forward": {"kind": "gelu", "bias": True}, "norm": {"kind": "layernorm", "eps": 1e-12},
    "feed_forward_chunk": 8,
}  # fmt: skip
THEIRS = {
    "embed.weight": "embeddings.word_embeddings.weight",
    "positions.weight": "embeddings.position_embeddings.embedding.weight",
    "attention_norm": "attention.layer_norm",
    "attention.qk_proj": "attention.self_attention.query_key",
    "attention.v_proj": "attention.self_attention.value",
    "attention.o_proj": "attention.output.dense",
    "feed_forward_norm": "feed_forward.layer_norm",
    "feed_forward.up_proj": "feed_forward.dense.dense",
    "feed_forward.down_proj": "feed_forward.output.dense",
}


def build_model(**changes: Any) -> Transformer:
    model = Transformer(ModelConfig.model_validate(REFORMER | changes))
    initialize_parameters(model, seed=1)
    return model


def draw_tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(0, 40, (3, length), generator=torch.Generator().manual_seed(0))


def get_their_name(name: str) -> str:
    if not name.startswith("blocks."):
        return THEIRS[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"encoder.layers.{layer}.{THEIRS[module]}.{kind}"


@pytest.mark.parametrize("is_decoder", [True, False])
def test_states_and_gradients_equal_transformers(is_decoder: bool) -> None:
    """Several rounds of hashing, shared queries and keys, both streams; theirs has the backward
    pass of the authors.

    In float64 for a decoder: in float32 theirs rounds the weight of a first token, whose scores are
    -1e5, to 0.4 %.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.ReformerConfig(
        vocab_size=40, hidden_size=16, attn_layers=["lsh", "lsh"], num_attention_heads=2,
        attention_head_size=8,
        feed_forward_size=24, hidden_act="gelu", axial_pos_embds=False,
        max_position_embeddings=LENGTH,
        num_hashes=HASHES, lsh_attn_chunk_length=CHUNK, num_buckets=2 * LENGTH // CHUNK,
        hash_seed=0,
        is_decoder=is_decoder, lsh_num_chunks_after=0, hidden_dropout_prob=0.0, use_cache=False,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    dtype = torch.float64 if is_decoder else torch.float32
    theirs = transformers.ReformerModel(config).to(dtype).train()
    head = {} if is_decoder else {"family": "encoder", "head": {"kind": "features"}}
    ours = build_model(**head).to(dtype).train()
    named, tokens_BT = dict(theirs.named_parameters()), draw_tokens()
    torch.manual_seed(0)
    # as theirs draws them in every layer
    directions_HKRE = torch.randn(2, 8, HASHES, LENGTH // CHUNK, dtype=dtype)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if not name.startswith(("norm.", "head.")):
                named[get_their_name(name)].copy_(parameter)
        for block in ours.blocks:
            block.get_submodule("attention").get_buffer("directions_HKRE").copy_(directions_HKRE)
    states: list[Tensor] = []
    theirs.encoder.layer_norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    theirs(tokens_BT)
    expected_BTD = torch.stack(states[0].chunk(2, dim=-1)).mean(0)  # theirs joins both streams
    found_BTD, _ = ours.run_blocks(ours.embed(tokens_BT))
    torch.testing.assert_close(found_BTD, expected_BTD, atol=1e-5, rtol=1e-5)
    weights_BTD = torch.randn(
        found_BTD.shape, dtype=dtype, generator=torch.Generator().manual_seed(2)
    )
    (found_BTD * weights_BTD).sum().backward()
    (expected_BTD * weights_BTD).sum().backward()
    for name, parameter in ours.named_parameters():
        if not name.startswith(("norm.", "head.")):
            expected = named[get_their_name(name)].grad
            assert parameter.grad is not None
            assert (parameter.grad - expected).norm() < 1e-5 * expected.norm().clamp(min=1e-2), name


def run_plainly(blocks: Any, x_BTD: Tensor, context: Any) -> Tensor:
    """Save every state, as autograd does by itself."""
    older_BTD = newer_BTD = x_BTD
    for block in blocks:
        for name in ("attention", "feed_forward"):
            older_BTD, newer_BTD = newer_BTD, older_BTD + block(newer_BTD, context, name)
    return (older_BTD + newer_BTD) / 2


@pytest.mark.parametrize("length", [3, 21])
def test_the_backward_pass_equals_that_of_saved_states(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, where recomputed states are the same to many digits; rows that fill no chunk,
    documents, padding.
    """
    model, tokens_BT, gradients = build_model().double().train(), draw_tokens(length), []
    documents_BT = torch.zeros_like(tokens_BT)
    documents_BT[0, length // 2 :], documents_BT[1, -2:] = 1, -1
    for run in (reversible.run_reversible_blocks, run_plainly):
        monkeypatch.setattr(layer_stack, "run_reversible_blocks", run)
        model.zero_grad()
        model(tokens_BT, documents_BT=documents_BT)[documents_BT >= 0].logsumexp(
            -1
        ).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_long_rows_hash_by_pairs() -> None:
    """Shorter rows have one hash, with two buckets for each chunk."""
    attention = LshAttentionConfig(chunk_length=4)
    assert [attention.list_directions(length) for length in (24, 256, 4096)] == [
        [6],
        [64],
        [23, 23],
    ]
    assert (attention.count_directions(4096), attention.count_directions(24)) == (64, 6)
    model = build_model(max_position_embeddings=400, position={"kind": "none"}).double().train()
    tokens_BT = torch.randint(0, 40, (1, 400), generator=torch.Generator().manual_seed(0))
    hash_positions = model.blocks[0].get_submodule("attention")._sort_positions
    order = hash_positions(torch.randn(1, 400, 2, 8, dtype=torch.float64), None)
    assert torch.equal(
        order.sorted_BHN.view(1, 2, HASHES, -1).sort(-1).values,
        torch.arange(400).expand(1, 2, HASHES, -1),
    )
    model(tokens_BT).logsumexp(-1).sum().backward()


def test_documents_do_not_see_each_other() -> None:
    model, tokens_BT = build_model().eval(), draw_tokens(CHUNK)
    documents_BT = torch.tensor([[0, 0, 1, 1]])
    alone = model(tokens_BT[:, 2:], documents_BT=documents_BT[:, 2:])
    together = model(tokens_BT, documents_BT=documents_BT)[:, 2:]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_saved_memory_does_not_grow_with_depth() -> None:
    kept = []
    for layers in (2, 6):
        model = build_model(num_hidden_layers=layers, attention={"kind": "multi_head"}).train()
        kept.append(
            measure_kept_bytes(partial(model, draw_tokens()), *model.parameters(), *model.buffers())
        )
    assert kept[0] == kept[1]


@torch.no_grad()
def test_a_cache_gives_the_logits_of_the_whole_row() -> None:
    """Of one layer: later ones keep states from when the row was shorter and its chunks were
    others.
    """
    model, tokens_BT = build_model(num_hidden_layers=1).eval(), draw_tokens(11)
    cache = KeyValueCache(model.config, 3, 11)
    model(tokens_BT[:, :6], cache=cache)
    for end in range(7, 12):
        found = model(tokens_BT[:, end - 1 : end], cache=cache)[:, -1]
        torch.testing.assert_close(found, model(tokens_BT[:, :end])[:, -1], atol=1e-5, rtol=1e-5)


def test_a_chunked_feed_forward_equals_a_whole_one() -> None:
    results = []
    for chunk in (None, 5):
        model = build_model(feed_forward_chunk=chunk).train()
        loss = model(draw_tokens()).logsumexp(-1).sum()
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "encoder_decoder", "residual": {"kind": "pre"}}, "lsh has no cross-attention"),
        (
            {"family": "encoder_decoder", "attention": {"kind": "multi_head"}},
            "reversible has no cross-attention",
        ),
        (
            {"dropout": {"residual": 0.1}},
            "repeats branches on rounded inputs. Leave dropout.residual out",
        ),
        ({"position": {"kind": "rope"}}, "rope is no position of attention.kind=lsh"),
        ({"num_key_value_heads": 1}, "lsh has a key for each of the 2 heads"),
        ({"sliding_window": 8}, "attention.kind=lsh chooses its keys itself"),
    ],
)
def test_models_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(REFORMER | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train": {"activation_checkpoint": "full"}},
            "full recomputes blocks, as model.residual.kind=reversible does",
        ),
        (
            {"train": {"compile": "block"}},
            "block is not proven with model.residual.kind=reversible",
        ),
        (
            {"engine": {"kind": "deepspeed", "zero_stage": 3}},
            "Use zero_stage=2, or engine.kind=torch",
        ),
        ({"layout": {"tensor": 2}}, "model.attention.kind=lsh needs full sequences on each rank"),
        ({"layout": {"pipeline": 2}}, "model.attention.kind=lsh does not run in stages"),
    ],
)
def test_runs_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    batch = {"sequence_length": LENGTH, "sequences": 2}
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"model": REFORMER, "batch": batch} | changes)
