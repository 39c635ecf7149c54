"""Initial values, rates and multipliers of µP, CompleteP and unit-scaled µP are those of the
papers' tables.
"""

import math
from typing import Any

import pytest
import torch

from llmsys.config.export.plain_model import remove_multipliers
from llmsys.config.loading.load import load_run_config
from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import AdamWConfig, MuonConfig
from llmsys.convert.exported_weights import change_weight
from llmsys.errors import ConfigError
from llmsys.model.initialization import compute_init_std, initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from tests.helpers.tiny_training import LENGTH, build_tiny_config

Settings = dict[str, Any]

BASE: Settings = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE: Settings = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "num_shared_experts": 1,
}  # fmt: skip
LATENT: Settings = {
    "kind": "latent", "q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}  # fmt: skip
MUP: Settings = {"kind": "mup", "base_hidden_size": 32}
# Four times as wide and three times as deep; the experts twice as wide.
WIDE: Settings = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 6, "moe": MOE | {"moe_intermediate_size": 32, "first_dense_layers": 1},
}  # fmt: skip
RATE = 0.5  # decay of the group builder below is 1
EMBED, HEAD, NORM = "embed.weight", "head.weight", "blocks.0.attention_norm.weight"
QUERY, DENSE = "blocks.0.attention.q_proj.weight", "blocks.0.feed_forward.down_proj.weight"
ROUTER, EXPERT = "blocks.1.feed_forward.router.weight", "blocks.1.feed_forward.experts.{}_proj"


def list_std_and_rates(
    config: ModelConfig, optimizer: Any = None
) -> dict[str, tuple[float, float, float]]:
    """Return std, rate factor and weight decay of every parameter."""
    with torch.device("meta"):
        named = dict(Transformer(config).named_parameters())
    groups = build_parameter_groups(
        named.items(), optimizer or AdamWConfig(weight_decay=1.0), config
    )
    assert sorted(name for group in groups for name in group.names) == sorted(named)
    return {
        name: (
            compute_init_std(config, name, named[name].shape),
            group.lr_multiplier,
            group.weight_decay,
        )
        for group in groups
        for name in group.names
    }


def test_mup_has_the_factors_of_its_table() -> None:
    """Yang 2022, table 8, as mup.init.normal_ and mup.MuAdamW have it for m = 4, and m = 2 in
    experts.
    """
    wide = {"base_moe_intermediate_size": 16}
    found = list_std_and_rates(build_tiny_config(**WIDE, parametrization=MUP | wide))
    plain = list_std_and_rates(build_tiny_config(**WIDE))
    factors = {
        EMBED: (1, 1), HEAD: (1, 1), QUERY: (0.5, 0.25), DENSE: (0.5, 0.25),
        EXPERT.format("up"): (0.5, 0.25), EXPERT.format("down"): (1 / math.sqrt(2), 0.5),
        ROUTER: (0.25, 0.25),  # an output: its number of rows stays
    }  # fmt: skip
    for name, (std, rate) in factors.items():
        assert found[name] == pytest.approx((std * plain[name][0], rate, 1 / rate)), name
    assert found[NORM][1:] == (1.0, 0.0)
    muon = list_std_and_rates(build_tiny_config(**WIDE, parametrization=MUP), MuonConfig())
    assert muon[QUERY][1] == pytest.approx(0.5), (
        "spectral norms of orthogonal updates grow by the root of m"
    )
    assert muon[HEAD][1] == 1


def test_mup_multiplies_logits_by_1_over_m_and_scores_by_1_over_head_dim() -> None:
    wide = Transformer(build_tiny_config(**WIDE | {"num_attention_heads": 4,
        "num_key_value_heads": 4},
                                         parametrization=MUP | {"base_head_dim": 8}))  # fmt: skip
    assert wide.get_submodule("head").scale == 0.25
    assert wide.get_submodule("blocks.0.attention").scale == pytest.approx(math.sqrt(8) / 32)
    assert wide.get_submodule("blocks.0").branch_factor == 1


def test_fixed_latents_are_outputs_and_then_inputs() -> None:
    sizes = WIDE | {"attention": LATENT, "num_key_value_heads": 16}
    found, plain = (
        list_std_and_rates(build_tiny_config(**sizes, **more))
        for more in ({"parametrization": MUP}, {})
    )
    names = {f"blocks.0.attention.{one}.weight": (std, rate) for one, std, rate in [
        ("q_a_proj", 0.25, 0.25), ("q_b_proj", 1, 1), ("kv_a_proj", 0.25, 0.25), ("kv_b_proj", 1,
            1),
        ("o_proj", 0.5, 0.25),
    ]}  # fmt: skip
    for name, (std, rate) in names.items():
        assert found[name][:2] == pytest.approx((std * plain[name][0], rate)), name
    muon = list_std_and_rates(build_tiny_config(**sizes, parametrization=MUP), MuonConfig())
    rates = {name: rate if "o_proj" not in name else 0.5 for name, (_, rate) in names.items()}
    assert {name: muon[name][1] for name in names} == pytest.approx(rates), (
        "a latent channel adds up a whole row"
    )


@pytest.mark.parametrize("exponent", [1.0, 0.5])
def test_complete_p_shrinks_branches_by_depth(exponent: float) -> None:
    """Dey 2025, table 1, for l = 3; exponent 0.5 is depth-µP (Yang 2023)."""
    deep = {
        "kind": "complete_p",
        "base_hidden_size": 32,
        "base_num_hidden_layers": 2,
        "depth_exponent": exponent,
    }
    config = build_tiny_config(**WIDE, parametrization=deep)
    found, wide = (
        list_std_and_rates(config),
        list_std_and_rates(build_tiny_config(**WIDE, parametrization=MUP)),
    )
    for name in (QUERY, NORM, ROUTER):
        assert found[name][1] == pytest.approx(wide[name][1] * 3 ** (exponent - 1)), name
    assert found[EMBED][1] == 1
    assert found[DENSE][0] == pytest.approx(wide[DENSE][0] * math.sqrt(3)), (
        "GPT-2's factor is that of the base depth"
    )
    assert Transformer(config).get_submodule("blocks.3").branch_factor == pytest.approx(
        3**-exponent
    )


def test_unit_scaled_has_the_factors_of_its_table() -> None:
    """Blake 2024, table 2: multiplier · std and multiplier · rate, as
    unit_scaling.optim.lr_scale_func_adam has it.
    """
    config = build_tiny_config(
        **WIDE, parametrization={"kind": "unit_scaled", "residual_multiplier": 2.0}
    )
    found, model = list_std_and_rates(config), Transformer(config)
    assert found[EMBED][:2] == pytest.approx((1, 128**-0.5))
    assert found[HEAD][:2] == (1, 1)
    assert model.get_submodule("head").scale == 1 / 128
    assert found[QUERY][:2] == pytest.approx((128**-0.5, 6**-0.5 / 128))
    assert found[EXPERT.format("down")][:2] == pytest.approx((32**-0.5, 6**-0.5 / 32))
    assert found[ROUTER][:2] == pytest.approx((1 / 128, 6**-0.5 / 128))
    assert model.get_submodule("blocks.0.attention").scale == pytest.approx(1 / 8)
    assert model.get_submodule("blocks.0").branch_factor == pytest.approx(2 / math.sqrt(6))


def compute_logits(config: ModelConfig, *, is_exported: bool = False) -> torch.Tensor:
    """Return the logits of a model, or of one without multipliers that has its exported weights."""
    source = Transformer(config)
    initialize_parameters(source, 0)
    exported = remove_multipliers(config)
    model = Transformer(exported if is_exported else config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = source.get_parameter(name)
            if name.endswith("bias"):
                value.normal_(generator=generator)
            parameter.copy_(
                change_weight(config, exported, f"parameter/{name}", value)
                if is_exported
                else value
            )
    tokens_BT = torch.randint(0, 64, (2, LENGTH), generator=generator)
    with torch.no_grad():
        logits: torch.Tensor = model(tokens_BT)
    return logits


@pytest.mark.parametrize("kind", [
    MUP | {"base_head_dim": 2}, {"kind": "complete_p", "base_hidden_size": 16,
        "base_num_hidden_layers": 3},
    {"kind": "unit_scaled", "attention_multiplier": 0.5},
], ids=["mup", "complete_p", "unit_scaled"])  # fmt: skip
@pytest.mark.parametrize("changes", [
    {"moe": None, "tie_word_embeddings": True, "norm": {"kind": "layernorm"},
     "attention": {"kind": "multi_head", "qkv_bias": True, "output_bias": True},
     "feed_forward": {"kind": "gelu", "bias": True}},
    {"attention": {"kind": "multi_head", "qk_norm": "head"},
        "moe": MOE | {"expert": {"kind": "gelu", "bias": True}}},
    {"attention": LATENT, "num_key_value_heads": 4, "residual": {"kind": "parallel"}},
    {"residual": {"kind": "pre", "multiplier": 0.5}},
], ids=["tied", "experts", "latent", "scaled branches"])  # fmt: skip
def test_exported_weights_compute_the_same_without_multipliers(
    kind: Settings, changes: Settings
) -> None:
    config = build_tiny_config(**{"initializer_range": 0.3} | changes, parametrization=kind)
    ours, exported = compute_logits(config), compute_logits(config, is_exported=True)
    assert ours.abs().max() > 1e-2
    torch.testing.assert_close(exported, ours, rtol=1e-4, atol=1e-5)


def test_branches_have_the_factor_of_the_model_times_that_of_its_parametrization() -> None:
    scaled = {"residual": {"kind": "pre", "multiplier": 0.5}}
    plain = Transformer(build_tiny_config(**WIDE, **scaled))
    assert plain.get_submodule("blocks.0").branch_factor == 0.5
    deep = {"kind": "complete_p", "base_hidden_size": 16, "base_num_hidden_layers": 2}
    both = Transformer(build_tiny_config(**WIDE, **scaled, parametrization=deep))
    assert both.get_submodule("blocks.0").branch_factor == pytest.approx(0.5 / 3)


def test_scores_fit_into_no_norm_that_adds_one() -> None:
    norms = {
        "norm": {"kind": "rmsnorm", "unit_offset": True},
        "attention": {"kind": "multi_head", "qk_norm": "head"},
    }
    with pytest.raises(ConfigError, match="keeps out of the norms of queries"):
        remove_multipliers(build_tiny_config(**norms, parametrization=MUP | {"base_head_dim": 2}))


def test_a_model_of_the_base_size_is_the_standard_one() -> None:
    base = MUP | {
        "base_head_dim": 8,
        "base_intermediate_size": 48,
        "base_moe_intermediate_size": 16,
    }
    deep = base | {"kind": "complete_p", "base_num_hidden_layers": 2}
    assert list_std_and_rates(build_tiny_config()) == list_std_and_rates(
        build_tiny_config(parametrization=deep)
    )
    assert torch.equal(
        compute_logits(build_tiny_config()), compute_logits(build_tiny_config(parametrization=deep))
    )


@pytest.mark.parametrize(("overrides", "message"), [
    (["optimizer.kind=adam"],
        r"optimizer\.kind: model\.parametrization\.kind=mup has no learning rates for adam"),
    (["model.initializer=xavier"],
        r"model\.initializer: parametrization\.kind=mup has no rule for xavier"),
    (["schedule={kind: noam, warmup_steps: 4}"],
        r"schedule\.kind: noam scales the rate by the width"),
    (["model.parametrization={kind: unit_scaled}", "model.residual.kind=sandwich"],
     r"model\.residual\.kind: parametrization\.kind=unit_scaled has no rule for sandwich\. Use "
     r"pre or parallel"),
    (["model.parametrization={kind: unit_scaled}", "model.attention.scale=0.1"],
        r"attention_multiplier"),
    (["model.embedding.scale=sqrt_hidden_size"],
        r"model\.embedding\.scale: parametrization\.kind=mup sets what"),
])  # fmt: skip
def test_settings_without_a_rule_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config("train/mup-tiny", overrides)
