"""Operations equal those that PyTorch counts, and the conventions differ in attention alone."""

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.loading.load import build_model_config
from llmsys.config.model import ModelConfig
from llmsys.estimate.flops import count_flops, count_visible_pairs, iter_document_lengths
from llmsys.estimate.model_tensors import count_parameters, list_model_tensors
from llmsys.model.experts import GroupedExperts
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from tests.helpers.counted_flops import (
    SEQUENCES,
    SOURCE,
    TARGET,
    count_forward_flops,
    use_eager_attention,
)
from tests.helpers.model_sections import DECODERS, ENCODERS, MIXTURES, MOE, PAIRS, SHAPE, VARIANTS
from tests.helpers.paths import TEST_DATA
from tests.reference import flops as reference

COUNTED: list[dict[str, Any]] = json.loads(
    (TEST_DATA / "estimate" / "counted_flops.json").read_text()
)
TINY: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("row", COUNTED, ids=lambda row: row["case"])
def test_full_attention_equals_the_counter_to_the_last_operation(row: dict[str, Any]) -> None:
    model = build_model_config(row["config"])
    flops = count_flops(model, row["sequence_length"], row["sequences"], "full")
    assert (flops.forward, flops.forward_backward) == (row["forward"], row["forward_backward"])
    assert count_parameters(model).total == row["parameters"]


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_architecture_equals_the_counter_on_our_own_module(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | changes)
    assert count_flops(
        config, SOURCE, SEQUENCES, "full", target_length=TARGET
    ).forward == count_forward_flops(config)


RECOMPUTED = ["dense", "sinks", "sandwich, capped, windows", "multi-query, parallel",
    "parallel with two norms", "post",
    "gated delta rule", "gated delta rule and gated attention", "gated delta rule with experts",
    "gated delta rule predicts further",
    "transformer-xl", "latent with biases", "norm over heads, output norms",
    "gated shared expert of its own width",
    "experts without a gate", "predicts further with experts and latents", "experts in latents",
    "experts in latents, and shared", "experts in latents, and shared, output norms",
    "latent and sparse", "predicts further with experts and sparse latents",
    "masked language model",
    "grouped, norm of each head", "experts in the decoder"]  # fmt: skip


def trained(config: ModelConfig, recompute: Any) -> int:
    """What PyTorch counts in forward and backward."""
    model = Transformer(config).train()
    apply_activation_checkpoint(model, recompute)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.grouped = False
    tokens_BT = torch.ones(
        SEQUENCES, TARGET if config.family == "encoder_decoder" else SOURCE, dtype=torch.long
    )
    source = {"source_BS": torch.ones(SEQUENCES, SOURCE, dtype=torch.long)}
    with FlopCounterMode(display=False) as counter:
        output = model(tokens_BT, **(source if config.family == "encoder_decoder" else {}))
        losses = [one.sum_auxiliary_losses() for one in model.list_indexers()]
        sums = [one.sum() for one in (output, *model.predicted)]
        torch.stack([*sums, *losses]).sum().backward()
    return counter.get_total_flops()


def repeated(config: ModelConfig, recompute: Any) -> int:
    counts = (
        count_flops(config, SOURCE, SEQUENCES, "hardware", target_length=TARGET, recompute=what)
        for what in ("none", recompute)
    )
    once, more = (count.forward_backward for count in counts)
    return more - once


@pytest.mark.parametrize("dropout", [{}, {"dropout": {"residual": 0.1}}], ids=["", "dropout"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_the_counter_sees_what_blocks_recompute(name: str, dropout: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(SHAPE | VARIANTS[name] | dropout)
    with use_eager_attention():
        assert trained(config, "full") - trained(config, "none") == repeated(config, "full") > 0


DELTA = ("gated delta rule", "kimi delta rule")
LINEAR = sorted(name for name in VARIANTS if name.startswith((*DELTA, "state space dual")))


@pytest.mark.parametrize("name", LINEAR)
def test_the_counter_sees_the_backward_pass_of_linear_attention(name: str) -> None:
    """Between projections it runs twice forward; a solve has a product in its backward pass."""
    config = ModelConfig.model_validate(SHAPE | VARIANTS[name])
    full, hardware = (count_flops(config, SOURCE, SEQUENCES, one) for one in ("full", "hardware"))
    with use_eager_attention():
        assert trained(config, "none") == hardware.forward_backward > full.forward_backward
    assert (full.forward_backward > 3 * full.forward) is name.startswith(DELTA)


@pytest.mark.parametrize("name", [name for name in VARIANTS if "sparse" in name])
def test_the_counter_sees_no_gradient_of_what_an_indexer_learns_from(name: str) -> None:
    config = ModelConfig.model_validate(SHAPE | VARIANTS[name])
    full = count_flops(config, SOURCE, SEQUENCES, "full")
    with use_eager_attention():
        assert trained(config, "none") == full.forward_backward < 3 * full.forward


def test_an_indexer_counts_the_keys_that_it_chooses_by_document() -> None:
    config = ModelConfig.model_validate(SHAPE | VARIANTS["latent and sparse"])
    lengths, (index, heads, channels, top) = (9, 4), (3 * (6 + 1), 4, (8 + 4, 6), 5)
    seen = sum(t + 1 for one in lengths for t in range(one))
    chosen = sum(min(t + 1, top) for one in lengths for t in range(one))
    products = seen * index + chosen * heads * (sum(channels) + channels[0])
    count = count_flops(config, 13, 2, "causal", documents=lengths)
    assert count.attention == 2 * 3 * 2 * products
    full = count_flops(config, 13, 2, "causal")
    assert full.attention > count.attention


@pytest.mark.parametrize(
    "name",
    [
        "latent and sparse, warm-up, neighbours",
        *["dense", "sinks", "sandwich, capped, windows", "experts without a gate", "original"],
        # On a CPU no kernel has keys wider than values, and pairs are computed again.
        *(name for name in LINEAR if "latents" not in name),
    ],
)
def test_the_counter_sees_what_is_recomputed_selectively(name: str) -> None:
    config = ModelConfig.model_validate(SHAPE | VARIANTS[name])
    assert trained(config, "selective") - trained(config, "none") == repeated(config, "selective")
    is_repeated = "sparse" in name or name in ("sinks", "sandwich, capped, windows", *LINEAR)
    assert (repeated(config, "selective") > 0) is is_repeated


def test_distances_are_repeated_where_no_kernel_knows_them() -> None:
    config = ModelConfig.model_validate(SHAPE | VARIANTS["transformer-xl"])
    heads, distances = 4 * 6, 2 * SOURCE - 1
    assert repeated(config, "selective") == 3 * SEQUENCES * 2 * heads * SOURCE * distances


def test_experts_that_choose_are_counted_by_their_room() -> None:
    routing = {"kind": "expert_choice", "factor": 1.5}
    config = ModelConfig.model_validate(
        SHAPE | {"moe": MOE | {"routing": routing, "balance": {"kind": "none"}}}
    )
    assert count_flops(config, SOURCE, SEQUENCES, "full").forward == count_forward_flops(config)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize("window", [None, 1, 3, 64, 100])
@pytest.mark.parametrize("documents", [(), (5,), (1, 9, 2)], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_pairs_are_those_that_a_mask_lets_through(
    length: int, documents: tuple[int, ...], window: int | None, causal: bool
) -> None:
    ours = sum(
        count_visible_pairs(one, window, causal=causal)
        for one in iter_document_lengths(length, documents)
    )
    assert ours == reference.count_visible_pairs(length, window, documents, causal=causal)


@pytest.mark.parametrize("documents", [(), (16, 40)], ids=["one document", "packed"])
def test_causal_attention_counts_windows_layer_by_layer(documents: tuple[int, ...]) -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    model = ModelConfig.model_validate(TINY | {"sliding_window": 8, "layer_types": kinds})
    flops = count_flops(model, 64, 3, "causal", documents=documents)
    pairs = sum(reference.count_visible_pairs(64, window, documents) for window in (8, 8, None))
    assert flops.attention == 3 * 4 * 24 * pairs


# Distances with no pair: windows, and the two streams, each of which hides some.
WITHOUT_WINDOWS = {
    name: changes
    for name, changes in (ENCODERS | PAIRS).items()
    if not name.startswith(("longformer", "two streams"))
}


@pytest.mark.parametrize("changes", WITHOUT_WINDOWS.values(), ids=WITHOUT_WINDOWS)
def test_what_sees_everything_costs_the_same_in_every_convention(changes: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(SHAPE | changes | {"sliding_window": None})
    causal, full = (
        count_flops(model, SOURCE, 1, name, target_length=TARGET) for name in ("causal", "full")
    )
    seen = (
        reference.count_visible_pairs(TARGET) - TARGET**2
        if model.family == "encoder_decoder"
        else 0
    )
    width = model.num_attention_heads * model.head_dim
    # recurrent layers attend to the source alone
    layers = model.num_hidden_layers if model.rnn is None else 0
    assert causal.attention - full.attention == 4 * width * seen * layers


@pytest.mark.parametrize("changes", (DECODERS | MIXTURES).values(), ids=DECODERS | MIXTURES)
def test_backward_is_twice_forward_and_causal_is_never_more(changes: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(SHAPE | changes)
    causal, full, hardware = (
        count_flops(model, 32, 2, name) for name in ("causal", "full", "hardware")
    )
    assert full.forward == hardware.forward
    # Chunks of states are computed as they are.
    has_attention = model.num_attention_layers and model.rnn is None
    assert causal.forward < full.forward or not has_attention
    # Distances and memories have no gradient: tests/llmsys/model/test_segment_memory.py counts
    # theirs.
    is_cut = any(row.cut_steps for row in list_model_tensors(model))
    # The solves of linear attention have a product in their backward pass alone.
    solved = full.forward_backward - 3 * full.forward
    is_solved = getattr(model.linear_attention, "kind", None) in ("gated_delta", "kimi_delta")
    assert solved > 0 if is_solved else solved < 0 if is_cut else solved == 0


def test_a_document_without_tokens_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"A document length of 0 tokens is too small\. Give lengths of 1 token or more\.",
    ):
        list(iter_document_lengths(8, (3, 0)))


def test_conventions_differ_in_attention_alone() -> None:
    model = ModelConfig.model_validate(TINY)
    causal, full, hardware = (
        count_flops(model, 128, 2, name) for name in ("causal", "full", "hardware")
    )
    assert causal.forward - causal.attention == full.forward - full.attention
    assert full.attention == full.tokens * 128 * 4 * 24 * 3
    assert hardware.forward_backward == full.forward_backward == 3 * full.forward


def test_twice_the_batch_is_twice_the_work_and_attention_grows_with_length() -> None:
    model = ModelConfig.model_validate(TINY)
    assert count_flops(model, 64, 6).forward == 2 * count_flops(model, 64, 3).forward
    shares = [count_flops(model, length, 1).attention_share for length in (16, 64, 256, 4096)]
    assert shares == sorted(shares)
    assert (
        count_flops(model, 64, 2, "full").flops_per_token
        == count_flops(model, 64, 2, "full").forward_backward / 128
    )
