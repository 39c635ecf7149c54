"""Operations equal those that PyTorch counts, and the conventions differ in attention alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.model import ModelConfig
from llmsys.estimate.flops import count_flops
from llmsys.estimate.parameters import count_parameters
from tests.reference.flops import visible_pairs

COUNTED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "counted_flops.json").read_text())
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
    model = ModelConfig.model_validate(row["model"])
    flops = count_flops(model, row["sequence_length"], row["sequences"], "full")
    assert (flops.forward, flops.forward_backward) == (row["forward"], row["forward_backward"])
    if "parameters" in row:
        assert count_parameters(model).total == row["parameters"]


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_causal_attention_counts_the_pairs_a_token_may_see(length: int) -> None:
    model = ModelConfig.model_validate(TINY)
    flops = count_flops(model, length, 3, "causal")
    assert flops.attention == 3 * model.num_hidden_layers * 4 * 24 * visible_pairs(length)


def test_conventions_differ_in_attention_alone() -> None:
    model = ModelConfig.model_validate(TINY)
    causal, full, hardware = (count_flops(model, 128, 2, name) for name in ("causal", "full", "hardware"))
    assert causal.forward - causal.attention == full.forward - full.attention
    assert full.attention == full.tokens * 128 * 4 * 24 * 3
    assert hardware.forward_backward == full.forward_backward == 3 * full.forward


def test_twice_the_batch_is_twice_the_work_and_attention_grows_with_length() -> None:
    model = ModelConfig.model_validate(TINY)
    assert count_flops(model, 64, 6).forward == 2 * count_flops(model, 64, 3).forward
    shares = [count_flops(model, length, 1).attention_share for length in (16, 64, 256, 4096)]
    assert shares == sorted(shares)
    assert count_flops(model, 64, 2, "full").per_token == count_flops(model, 64, 2, "full").forward_backward / 128


def test_products_outside_attention_equal_the_counter_on_our_own_module() -> None:
    from llmsys.model.transformer import Transformer

    config = ModelConfig.model_validate(TINY | {"tie_word_embeddings": True})
    with torch.device("meta"):
        model = Transformer(config)
        tokens = torch.zeros(2, 16, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    ours = count_flops(config, 16, 2, "full")
    assert products == ours.forward - ours.attention
