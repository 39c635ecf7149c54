"""Positions against Hugging Face's functions and the papers' own properties."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from llmsys.config.model import ModelConfig
from llmsys.config.position import RelativeBiasConfig, RopeConfig
from llmsys.model.embedding import (
    RelativePositionBias,
    SinusoidalPositionEmbedding,
    compute_alibi_bias,
    compute_alibi_slopes,
)
from llmsys.model.rotary_embedding import RotaryEmbedding, compute_rope_frequencies

WIDTH, POSITIONS, OLD = 16, 4096, 512
DIVISORS = [1.0, 1.1, 1.3, 2.0, 3.0, 5.0, 8.0, 9.0]
CPU = torch.device("cpu")


def model(**changes: Any) -> ModelConfig:
    sizes = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1}
    return ModelConfig(
        **{**sizes, "num_attention_heads": 2, "max_position_embeddings": POSITIONS, **changes}
    )


@pytest.mark.parametrize("length", [100, 2000])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"kind": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"kind": "ntk", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}),
        ({"kind": "yarn", "factor": 8.0}, {"rope_type": "yarn", "factor": 8.0}),
        (
            {
                "kind": "yarn",
                "factor": 40.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.1,
                "beta_fast": 20.0,
                "truncate": False,
            },
            {
                "rope_type": "yarn",
                "factor": 40.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.1,
                "beta_fast": 20.0,
                "truncate": False,
            },
        ),
        (
            {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        (
            {"kind": "longrope", "short_factor": DIVISORS, "long_factor": DIVISORS[::-1]},
            {"rope_type": "longrope", "short_factor": DIVISORS, "long_factor": DIVISORS[::-1]},
        ),
    ],
)
def test_waves_equal_hugging_faces(
    ours: dict[str, Any], theirs: dict[str, Any], length: int
) -> None:
    kind = ours["kind"]
    if kind != "linear":
        ours = {**ours, "original_max_position_embeddings": OLD}
        theirs = {**theirs, "original_max_position_embeddings": OLD}
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=OLD if kind == "ntk" else POSITIONS,
        rope_parameters={"rope_theta": 5000.0, **theirs},
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, CPU, seq_len=length)
    waves = compute_rope_frequencies(
        RopeConfig(theta=5000.0, scaling=ours), WIDTH, POSITIONS, length
    )
    torch.testing.assert_close(torch.tensor(waves.frequencies), expected.float(), rtol=1e-5, atol=0)
    assert waves.attention_factor == pytest.approx(amplitude)


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_scores_depend_on_the_distance_alone(pairing: str, fraction: float) -> None:
    config = model(position={"kind": "rope", "pairing": pairing, "fraction": fraction})
    table = RotaryEmbedding(config, config.position)  # type: ignore[arg-type]
    q, k = torch.randn(2, 1, 1, 1, 16).double()
    rotate = table(None, 300, device=CPU)
    rotated_q, rotated_k = (rotate(x.expand(1, 300, 1, 16)) for x in (q, k))
    scores_TS = (rotated_q[0, :, 0] @ rotated_k[0, :, 0].T).float()
    for distance in (0, 1, 77):
        torch.testing.assert_close(
            scores_TS.diagonal(-distance), scores_TS[distance, 0].expand(300 - distance)
        )
    assert (scores_TS[:, 0] - scores_TS[0, 0]).abs().max() > 0.1


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_a_pair_turns_forward_by_its_angle_times_the_position(pairing: str) -> None:
    config = model(position={"kind": "rope", "pairing": pairing, "theta": 100.0})
    table = RotaryEmbedding(config, config.position)  # type: ignore[arg-type]
    x_BTHK = torch.randn(1, 9, 2, WIDTH, generator=torch.Generator().manual_seed(0))

    def as_pairs(x: Tensor) -> Tensor:
        return (
            torch.complex(*x.chunk(2, -1))
            if pairing == "halves"
            else torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        )

    angles_TK = torch.outer(torch.arange(9.0), 100.0 ** (-2 * torch.arange(WIDTH / 2) / WIDTH))
    turned = as_pairs(x_BTHK) * torch.polar(torch.ones_like(angles_TK), angles_TK)[:, None]
    torch.testing.assert_close(as_pairs(table(None, 9, device=CPU)(x_BTHK)), turned)


def test_explicit_positions_read_the_same_table() -> None:
    config = model(position={"kind": "rope", "sliding_theta": 100.0})
    table = RotaryEmbedding(config, config.position)  # type: ignore[arg-type]
    x = torch.randn(2, 5, 2, 16)
    positions_BT = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    torch.testing.assert_close(
        table(positions_BT, 12, device=CPU)(x)[0], table(None, 5, device=CPU)(x)[0]
    )
    assert not torch.equal(
        table(None, 5, device=CPU)(x), table(None, 5, device=CPU, sliding=True)(x)
    )


@pytest.mark.parametrize("heads", [8, 12, 71])
def test_alibi_equals_blooms_up_to_a_constant_per_row(heads: int) -> None:
    theirs_HS = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).view(heads, 9)
    ours_HTS = compute_alibi_bias(compute_alibi_slopes(heads), torch.arange(9), torch.arange(9))
    torch.testing.assert_close(ours_HTS[:, 8] - ours_HTS[:, 8, :1], theirs_HS - theirs_HS[:, :1])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_equal_t5s(bidirectional: bool) -> None:
    table = RelativePositionBias(RelativeBiasConfig(buckets=32, max_distance=128), heads=2)
    queries, keys = torch.arange(300), torch.arange(300)
    theirs = T5Attention._relative_position_bucket(
        keys[None] - queries[:, None], bidirectional, 32, 128
    )
    expected_HTS = table.weight[theirs].permute(2, 0, 1)
    torch.testing.assert_close(table(queries, keys, bidirectional=bidirectional), expected_HTS)


def test_sinusoids_are_the_papers() -> None:
    config = model(position={"kind": "sinusoidal"})
    at_TD = SinusoidalPositionEmbedding(config, config.position)(torch.arange(50))  # type: ignore[arg-type]
    assert float(at_TD[7, 10]) == pytest.approx(math.sin(7 / 10000 ** (10 / 32)), abs=1e-6)
    assert float(at_TD[7, 11]) == pytest.approx(math.cos(7 / 10000 ** (10 / 32)), abs=1e-6)
