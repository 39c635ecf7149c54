"""Every kernel that attention may take gives what the plain operations give, output and
gradients.
"""

import math

import pytest
import torch

from llmsys.model.attention_mask import (
    AttentionMask,
    build_cross_attention_mask,
    build_self_attention_mask,
    compute_document_positions,
)
from llmsys.model.latent_attention import compute_mla_scale
from llmsys.model.scaled_dot_product import compute_attention, compute_eager_attention
from tests.helpers.model_choices import LATENT
from tests.helpers.tiny_model import build_tiny_config, compute_relative_error

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 3, 3, 3, 3, 3]])
MASKS = {
    "everything": AttentionMask(),
    "causal": AttentionMask(causal=True),
    "documents": build_self_attention_mask(6, causal=True, documents_BT=DOCUMENTS),
    "both ways": build_self_attention_mask(6, causal=False, documents_BT=DOCUMENTS),
    "window": build_self_attention_mask(6, causal=True, window=2),
    "padded": build_self_attention_mask(6, causal=True, padding_B=torch.tensor([0, 4])),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_kernels_equal_plain_operations(mask: AttentionMask, bias: bool) -> None:
    torch.manual_seed(0)
    q, k, v, out_gradient = (
        torch.randn(2, 6, heads, width) for heads, width in [(4, 8), (2, 8), (2, 5), (4, 5)]
    )
    added = torch.randn(4, 6, 6)
    inputs = [x.requires_grad_() for x in ([q, k, v, added] if bias else [q, k, v])]
    mask = mask.add_bias(added) if bias else mask
    results = [
        run(q, k, v, mask, scale=0.3) for run in (compute_attention, compute_eager_attention)
    ]
    for ours, plain in zip(
        *([y, *torch.autograd.grad(y, inputs, out_gradient, retain_graph=True)] for y in results),
        strict=True,
    ):
        assert compute_relative_error(ours, plain) < 1e-5


def test_scores_are_divided_by_the_root_of_the_width_unless_told_otherwise() -> None:
    q, k, v = torch.randn(3, 2, 6, 4, 8, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v))
    ).transpose(1, 2)
    for attend in (compute_attention, compute_eager_attention):
        torch.testing.assert_close(attend(q, k, v, AttentionMask()), expected)


def test_dropout_drops_weights_in_every_path() -> None:
    q = k = v = torch.ones(1, 64, 4, 8)
    for extra in ({}, {"softcap": 9.0}, {"sinks_H": torch.full((4,), -1e9)}):
        y = compute_attention(q, k, v, AttentionMask(), dropout=0.5, **extra)
        assert float(y.mean()) == pytest.approx(1, abs=0.1)
        assert float(y.std()) > 0.05


def test_a_mask_says_no_more_than_it_must() -> None:
    assert (
        build_self_attention_mask(5, causal=True)
        == build_self_attention_mask(5, causal=True, window=5)
        == AttentionMask(causal=True)
    )
    assert build_self_attention_mask(5, causal=False) == AttentionMask()
    assert build_self_attention_mask(1, causal=True, start=7) == AttentionMask()
    assert build_cross_attention_mask(None, None, 3, 4) == AttentionMask()


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_counts_the_token_itself(causal: bool) -> None:
    visible = build_self_attention_mask(4, causal=causal, start=3, window=3).visible_B1TS[0, 0]
    for t in range(4):
        reach = 0 if causal else 2
        assert visible[t].nonzero().flatten().tolist() == [
            s for s in range(7) if t + 1 <= s <= t + 3 + reach
        ]


def test_a_target_without_a_source_sees_something() -> None:
    visible = build_cross_attention_mask(
        torch.tensor([[0, 5]]), torch.tensor([[0, 0, -1]]), 2, 3
    ).visible_B1TS
    assert visible.tolist() == [[[[True, True, False], [True, True, True]]]]


def test_positions_count_from_the_start_of_each_document() -> None:
    assert compute_document_positions(DOCUMENTS).tolist() == [
        [0, 1, 2, 0, 1, 0],
        [0, 0, 1, 2, 3, 4],
    ]


def test_yarn_sharpens_latent_scores_as_in_deepseek_v3() -> None:
    scaling = {"kind": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    for mscale, expected in [(1.0, 0.1352337788608801), (None, 192**-0.5)]:
        config = build_tiny_config(
            attention=LATENT | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            num_key_value_heads=4,
            position={
                "kind": "rope",
                "scaling": scaling | {"mscale": mscale, "mscale_all_dim": mscale},
            },
        )
        assert math.isclose(compute_mla_scale(config, config.attention), expected, rel_tol=1e-9)  # type: ignore[arg-type]
