"""The plain QK-clip makes the logits of each head as small as the paper says, and no smaller."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.doctor.pairs.plain_clip import PlainQueryClip
from llmsys.model.attention_logits import LogitRecorder
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_model import build_tiny_config

TOKENS_BT = torch.arange(36).view(3, 12) * 7 % 29
LATENT = {
    "kind": "latent",
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def record_maxima(model: Transformer) -> Tensor:
    """The largest logit of each head of the first layer, (H,)."""
    model(TOKENS_BT)
    layer: Any = model.blocks[0].attention
    recorder: LogitRecorder = layer.logit_recorder
    return recorder.take_maxima(torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 4, "num_key_value_heads": 4},
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attention": {"kind": "multi_head", "qkv_bias": True},
        },
        {"num_attention_heads": 4, "num_key_value_heads": 4, "attention": LATENT},
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "attention": LATENT | {"q_lora_rank": 8},
        },
    ],
    ids=str,
)
def test_logits_of_a_head_become_as_much_smaller_as_they_were_too_large(
    changes: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model = Transformer(build_tiny_config(**changes)).train()
    # Biases that are zero would not show that they are scaled.
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    PlainQueryClip(model, 1.0)
    before_H = record_maxima(model)
    threshold = float(before_H.sort().values[1])
    clip = PlainQueryClip(model, threshold)
    weights = {f"parameter/{name}": one.detach() for name, one in model.named_parameters()}
    unchanged = {name: one.clone() for name, one in weights.items()}
    model(TOKENS_BT)
    clip.clip(weights, "parameter/", is_applied=False)
    assert all(torch.equal(one, unchanged[name]) for name, one in weights.items())
    model(TOKENS_BT)
    clip.clip(weights, "parameter/", is_applied=True)
    after_H = record_maxima(model)
    torch.testing.assert_close(after_H, before_H.clamp(max=threshold), rtol=1e-4, atol=1e-5)
    assert (before_H > 1.01 * threshold).any()
