"""Routers, experts and losses against transformers', with equal weights: outputs and gradients
in float32.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmsys.config.moe import MoeConfig
from llmsys.model.load_balancing import compute_load_balancing_loss, count_tokens_by_row
from llmsys.model.moe_layer import MoELayer
from tests.helpers.tiny_model import compute_relative_error

transformers = pytest.importorskip("transformers")
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe  # noqa: E402
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import (  # noqa: E402
    MixtralSparseMoeBlock,
    load_balancing_loss_func,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE  # noqa: E402
from transformers.models.phimoe.modeling_phimoe import PhimoeSparseMoeBlock  # noqa: E402
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock  # noqa: E402

WIDTH, INNER, EXPERTS = 16, 8, 8
SIZES = {
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": INNER,
    "num_experts_per_tok": 2,
}
NONE = {"kind": "none"}
Case = tuple[type[nn.Module], str, dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "mixtral": (
        MixtralSparseMoeBlock,
        "MixtralConfig",
        {"num_local_experts": EXPERTS, "intermediate_size": INNER},
        {"balance": NONE},
    ),
    "qwen2_moe": (
        Qwen2MoeSparseMoeBlock,
        "Qwen2MoeConfig",
        {"num_experts": EXPERTS, "shared_expert_intermediate_size": 12, "norm_topk_prob": False},
        {
            "balance": NONE,
            "shared_intermediate_size": 12,
            "shared_gate": True,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v2": (
        DeepseekV2Moe,
        "DeepseekV2Config",
        {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
        {
            "balance": NONE,
            "num_shared_experts": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "groups": {"num_groups": 4, "groups_per_token": 2, "score": "max"},
        },
    ),
    "deepseek_v3": (
        DeepseekV3MoE,
        "DeepseekV3Config",
        {
            "n_routed_experts": EXPERTS,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        {
            "score": "sigmoid",
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "groups": {"num_groups": 4, "groups_per_token": 2, "score": "top2"},
        },
    ),
    "nemotron_h": (
        NemotronHMoE,
        "NemotronHConfig",
        {
            "n_routed_experts": EXPERTS,
            "moe_latent_size": 6,
            "moe_shared_expert_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        {
            "score": "sigmoid",
            "expert": {"kind": "squared_relu"},
            "latent_size": 6,
            "shared_intermediate_size": 12,
            "routed_scaling_factor": 2.5,
            "groups": {"num_groups": 4, "groups_per_token": 2, "score": "top2"},
        },
    ),
    "gpt_oss": (
        GptOssMLP,
        "GptOssConfig",
        {"num_local_experts": EXPERTS, "intermediate_size": INNER},
        {"balance": NONE, "router_bias": True, "expert": {"kind": "clamped_swiglu", "bias": True}},
    ),
    "phimoe": (
        PhimoeSparseMoeBlock,
        "PhimoeConfig",
        {"num_local_experts": EXPERTS, "intermediate_size": INNER, "router_jitter_noise": 0.1},
        {"balance": NONE, "score": "sparsemixer", "jitter": 0.1},
    ),
}


def pair(case: Case) -> tuple[nn.Module, MoELayer, dict[str, Tensor]]:
    """Theirs and ours, and for each parameter of ours what takes its value (and gradient) from
    theirs.
    """
    kind, config_name, their_fields, our_fields = case
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**SIZES | their_fields)
    config._experts_implementation = "eager"
    theirs = kind(config).eval()
    ours = MoELayer(WIDTH, MoeConfig.model_validate(SIZES_OF_OURS | our_fields)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.6)
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(0.0, 0.3)
                ours.balance_bias_E.copy_(buffer)
        views = translated(
            {name: p.detach() for name, p in theirs.named_parameters()}, kind is GptOssMLP
        )
        assert views.keys() == dict(ours.named_parameters()).keys()
        for name, parameter in ours.named_parameters():
            parameter.copy_(views[name])
    return theirs, ours, views


SIZES_OF_OURS = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}


def translated(named: dict[str, Tensor], interleaved: bool) -> dict[str, Tensor]:
    """Their tensors (or gradients) under our names and in our shapes."""
    out: dict[str, Tensor] = {}
    for name, tensor in named.items():
        name = name.replace("gate.", "router.", 1) if name.startswith("gate.") else name
        name = name.replace("shared_experts.", "shared.").replace(
            "shared_expert_gate", "shared_gate"
        )
        name = name.replace("shared_expert.", "shared.")
        if "gate_up_proj" in name:
            whole = tensor if interleaved else tensor.transpose(1, 2)
            halves = (whole[..., ::2], whole[..., 1::2]) if interleaved else whole.chunk(2, dim=-1)
            for which, half in zip(("gate", "up"), halves, strict=True):
                kind = "bias" if name.endswith("bias") else "proj"
                out[f"experts.{which}_{kind}"] = half
        elif name == "experts.down_proj_bias":
            out["experts.down_bias"] = tensor
        elif name in ("experts.down_proj", "experts.up_proj"):
            out[name] = tensor if interleaved else tensor.transpose(1, 2)
        else:
            out[name] = tensor
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_layer_equals_transformers_forward_and_backward(case: Case) -> None:
    theirs, ours, _ = pair(case)
    x, out_gradient = torch.randn(2, 50, WIDTH), torch.randn(2, 50, WIDTH)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    expected, y = theirs(inputs[0]), ours(inputs[1])
    expected = expected[0] if isinstance(expected, tuple) else expected
    expected.backward(out_gradient)
    y.backward(out_gradient)
    assert compute_relative_error(y, expected) < 1e-5
    assert compute_relative_error(inputs[1].grad, inputs[0].grad) < 1e-5
    gradients = translated({n: p.grad for n, p in theirs.named_parameters()}, case[0] is GptOssMLP)
    for name, parameter in ours.named_parameters():
        assert compute_relative_error(parameter.grad, gradients[name]) < 1e-5, name


def test_balance_loss_equals_transformers_up_to_its_factor_of_k() -> None:
    ours = pair(CASES["mixtral"])[1]
    x = torch.randn(1, 40, WIDTH)
    scores = ours.router.compute_scores(x[0])
    real = torch.ones(1, 40, dtype=torch.bool)
    asked = count_tokens_by_row(ours.router.select_experts(scores).experts_NK, EXPERTS, real)
    loss = compute_load_balancing_loss(scores, asked / asked.sum(), real) / 40
    expected = load_balancing_loss_func((scores.logits_NE,), EXPERTS, top_k=2)
    torch.testing.assert_close(2 * loss, expected)
