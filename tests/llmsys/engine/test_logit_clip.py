"""QK-clip brings the largest logit of each head down to the threshold, and leaves other heads
alone.
"""

from typing import Any

import pytest
import torch

from llmsys.config.loading.load import load_run_config
from llmsys.engine import logit_clip
from llmsys.engine.logit_clip import LogitClip
from llmsys.errors import ConfigError
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_training import LENGTH, build_tiny_config

LATENT: dict[str, Any] = {
    "attention": {
        "kind": "latent", "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "num_key_value_heads": 4,
}  # fmt: skip
BIASED: dict[str, Any] = {"attention": {"kind": "multi_head", "qkv_bias": True}}


@pytest.mark.parametrize("changes", [BIASED, LATENT], ids=["grouped keys", "latent"])
def test_heads_beyond_the_threshold_come_down_to_it_and_others_stay(
    changes: dict[str, Any],
) -> None:
    # One block: the logits of a later one depend on the values of an earlier one only, but its
    # input would change.
    model = Transformer(build_tiny_config(**changes, num_hidden_layers=1, initializer_range=0.4))
    initialize_parameters(model, 3)
    tokens_BT = torch.randint(0, 64, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    clip = LogitClip(model, 1.0)

    def measure() -> torch.Tensor:
        model.train()
        model(tokens_BT)
        return clip.take_maxima()[0]

    before_H = measure()
    clip._threshold = float(before_H.median())
    assert (before_H > clip._threshold).any()
    model(tokens_BT)
    clip.finish_step(applied=False)
    torch.testing.assert_close(measure(), before_H)
    model(tokens_BT)
    clip.finish_step(applied=True)
    torch.testing.assert_close(measure(), before_H.clamp(max=clip._threshold), rtol=1e-4, atol=1e-5)


def test_the_largest_logits_of_all_ranks_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Transformer(build_tiny_config(num_hidden_layers=1, initializer_range=0.4))
    initialize_parameters(model, 3)
    tokens_BT = torch.randint(0, 64, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    clip = LogitClip(model, 1.0)
    model(tokens_BT)
    before_H = clip.take_maxima()[0]
    clip._threshold = float(before_H.max())
    # Another rank saw logits four times as large, which this rank would not clip.
    monkeypatch.setattr(logit_clip, "all_reduce_max", lambda maxima_LH: 4 * maxima_LH)
    model(tokens_BT)
    clip.finish_step(applied=True)
    model(tokens_BT)
    gamma_H = (clip._threshold / (4 * before_H)).clamp(max=1)
    torch.testing.assert_close(clip.take_maxima()[0], before_H * gamma_H, rtol=1e-4, atol=1e-5)


def test_settings_that_hide_logits_are_refused() -> None:
    standard = ["model.parametrization={kind: standard}", "optimizer.max_attention_logit=50"]
    with pytest.raises(ConfigError, match=r"layout\.context: 2 ranks share the positions"):
        load_run_config("train/mup-tiny", [*standard, "layout.context=2"])
    with pytest.raises(
        ConfigError, match=r"model\.attention\.qk_norm: head norms bound the logits"
    ):
        load_run_config("train/mup-tiny", [*standard, "model.attention.qk_norm=head"])
    with pytest.raises(
        ConfigError, match=r"model\.attention\.clip: clamped queries and keys do not shrink"
    ):
        load_run_config("train/mup-tiny", [*standard, "model.attention.clip=8"])
    with pytest.raises(ConfigError, match=r"optimizer\.kind: schedule_free keeps an average"):
        load_run_config("train/mup-tiny", [*standard, "optimizer.kind=schedule_free"])
    with pytest.raises(ConfigError, match=r"engine\.kind: deepspeed holds masters in vectors"):
        load_run_config("train/mup-tiny", [*standard, "engine.kind=deepspeed"])
