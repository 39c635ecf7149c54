"""Layers without attention or without a feed-forward, and attention beside linear attention, are
those of plain compositions of their modules; documents of a row know nothing of each other.
"""

from typing import Any

import pytest
import torch

from llmsys.model.transformer import Transformer
from tests.helpers.sharded_steps import HYBRIDS, build_named_model
from tests.helpers.tiny_model import build_tiny_config, build_tiny_model, build_tiny_tokens

NAMES = [
    "one sub-layer a layer, experts",
    "attention alone",
    "attention beside states",
]


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_documents_of_a_row_are_those_alone(name: str) -> None:
    model = build_named_model(name).eval()
    tokens_BT = build_tiny_tokens(rows=1, length=17)
    documents_BT = torch.tensor([[0] * 6 + [1] * 4 + [2] * 7])
    packed = model(tokens_BT, documents_BT=documents_BT)
    alone = [model(one) for one in tokens_BT.split([6, 4, 7], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)
    # A state or a key of another document would be seen.
    assert (packed - model(tokens_BT)).abs().max() > 0.01


@torch.no_grad()
def test_blocks_are_what_their_modules_add_to_the_stream() -> None:
    changes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid", "feed_forward", "full_attention"],
        "feed_forward_layers": [True, True, False],
        "position": {"kind": "none"},
        "linear_attention": HYBRIDS["mamba2"].linear_attention,
        "multipliers": {
            "attention": {"o_proj": 0.5},
            "linear_attention": {"o_proj": 0.3},
            "feed_forward": {"down_proj": 2.0},
        },
    }
    scaled = build_tiny_model(build_tiny_config(**changes)).eval()
    plain = Transformer(build_tiny_config(**changes | {"multipliers": None})).eval()
    plain.load_state_dict(scaled.state_dict())
    names = [name for name, _ in plain.blocks.named_parameters()]
    assert not any(name.startswith(("1.attention", "2.feed_forward")) for name in names)
    contexts: list[Any] = []
    scaled.blocks[0].register_forward_pre_hook(lambda _, inputs: contexts.append(inputs))
    tokens_BT = build_tiny_tokens()
    scaled(tokens_BT)
    x_BTD, context = contexts[0]
    first, second, third = plain.blocks
    inner_BTD = first.attention_norm(x_BTD)
    x_BTD = x_BTD + 0.5 * first.attention(inner_BTD, context)
    x_BTD = x_BTD + 0.3 * first.linear_attention(inner_BTD, context)
    for block in (first, second):
        x_BTD = x_BTD + 2.0 * block.feed_forward(block.feed_forward_norm(x_BTD))
    x_BTD = x_BTD + 0.5 * third.attention(third.attention_norm(x_BTD), context)
    expected = plain.head(plain.norm(x_BTD))
    torch.testing.assert_close(scaled(tokens_BT), expected, rtol=1e-5, atol=1e-5)
