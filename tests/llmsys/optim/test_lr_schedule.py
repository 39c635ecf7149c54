"""The learning rate at the points where its shape is known, and the original's formula all
along.
"""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from llmsys.config.optimizer import AdamWConfig
from llmsys.config.run import RunConfig
from llmsys.config.schedule import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    InverseSqrtScheduleConfig,
    LinearScheduleConfig,
    NoamScheduleConfig,
    PythonScheduleConfig,
    ScheduleConfig,
    WsdScheduleConfig,
)
from llmsys.errors import ConfigError
from llmsys.model.transformer import Transformer
from llmsys.optim.lr_schedule import (
    compute_learning_rate,
    compute_lr_multiplier,
    load_python_schedule,
)
from llmsys.optim.parameter_groups import build_parameter_groups, get_parameter_role
from tests.helpers.paths import ROOT
from tests.helpers.tiny_training import build_tiny_config

BUDGET, WARMUP = 1000.0, 100
ALL: list[ScheduleConfig] = [
    WsdScheduleConfig(warmup_tokens=WARMUP, decay_tokens=400, min_lr_factor=0.1),
    CosineScheduleConfig(warmup_tokens=WARMUP, min_lr_factor=0.1),
    LinearScheduleConfig(warmup_tokens=WARMUP, min_lr_factor=0.1),
    ConstantScheduleConfig(warmup_tokens=WARMUP),
    InverseSqrtScheduleConfig(warmup_tokens=WARMUP),
]


@pytest.mark.parametrize("config", ALL, ids=lambda config: config.kind)
def test_every_shape_rises_to_its_peak_and_never_above(config: ScheduleConfig) -> None:
    assert compute_lr_multiplier(config, WARMUP / 2, BUDGET) == 0.5
    assert compute_lr_multiplier(config, WARMUP, BUDGET) == pytest.approx(1.0)
    shares = [
        compute_lr_multiplier(config, tokens, BUDGET)
        for tokens in range(WARMUP, int(BUDGET) + 1, 10)
    ]
    assert all(earlier >= later for earlier, later in pairwise(shares))


@pytest.mark.parametrize("config", ALL[:3], ids=lambda config: config.kind)
def test_shapes_that_end_end_at_their_final_share(config: ScheduleConfig) -> None:
    assert compute_lr_multiplier(config, BUDGET, BUDGET) == pytest.approx(0.1)
    assert compute_lr_multiplier(config, BUDGET + 500, BUDGET) == pytest.approx(0.1)


def test_points_on_the_way() -> None:
    stable, cosine, linear, constant, _ = ALL
    assert compute_lr_multiplier(stable, 600, BUDGET) == 1.0
    assert compute_lr_multiplier(stable, 800, BUDGET) == pytest.approx(0.55)
    assert compute_lr_multiplier(cosine, 550, BUDGET) == pytest.approx(0.55)
    assert compute_lr_multiplier(linear, 550, BUDGET) == pytest.approx(0.55)
    assert compute_lr_multiplier(constant, 999, BUDGET) == 1.0


@pytest.mark.parametrize("step", [1, 37, 100, 101, 5000])
def test_inverse_sqrt_is_the_original_formula_up_to_its_constant(step: int) -> None:
    original = min(step**-0.5, step * WARMUP**-1.5)
    share = compute_lr_multiplier(ALL[4], step, BUDGET)
    assert share * WARMUP**-0.5 == pytest.approx(original)
    assert math.isfinite(share)


def run_with(schedule: ScheduleConfig, **sections: object) -> RunConfig:
    """A run of 100 steps of 10 tokens at a peak of 2e-3."""
    batch = {"sequence_length": 5, "sequences": 2}
    settings = {
        "schedule": schedule,
        "batch": batch,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "train": {"tokens": 1000},
    }
    return RunConfig.model_validate(settings | sections)


def test_the_rate_of_a_step_is_the_share_of_the_tokens_after_it() -> None:
    assert compute_learning_rate(run_with(ALL[2]), 55) == pytest.approx(1.1e-3)


def test_the_original_schedule_has_its_known_points() -> None:
    # The base model of the paper: 512 wide, 4000 steps of warm-up, and no factor.
    config = run_with(
        NoamScheduleConfig(warmup_steps=4000), model=build_tiny_config(hidden_size=512),
        train={"tokens": 1_000_000},
        optimizer={"kind": "adamw", "learning_rate": 1.0},
    )  # fmt: skip
    assert (
        compute_learning_rate(config, 1)
        == pytest.approx(512**-0.5 * 4000**-1.5)
        == pytest.approx(1.7469e-7, rel=1e-4)
    )
    assert (
        compute_learning_rate(config, 4000)
        == pytest.approx((512 * 4000) ** -0.5)
        == pytest.approx(6.9877e-4, rel=1e-4)
    )
    assert compute_learning_rate(config, 16_000) == pytest.approx(
        compute_learning_rate(config, 4000) / 2
    )
    assert compute_learning_rate(config, 2000) == pytest.approx(
        compute_learning_rate(config, 4000) / 2
    )
    peak = max(range(3990, 4011), key=lambda step: compute_learning_rate(config, step))
    assert peak == 4000


def test_the_original_adam_can_be_said() -> None:
    config = run_with(
        ALL[4],
        optimizer={
            "kind": "adamw",
            "betas": [0.9, 0.98],
            "eps": 1e-9,
            "weight_decay": 0,
            "max_grad_norm": 0,
        },
    )
    assert (config.optimizer.betas, config.optimizer.eps) == ((0.9, 0.98), 1e-9)


def test_groups_hold_every_parameter_once_by_role_and_decay() -> None:
    named = dict(Transformer(build_tiny_config()).named_parameters())
    groups = build_parameter_groups(
        named.items(), AdamWConfig(weight_decay=0.2, embedding_lr_multiplier=3.0)
    )
    assert sorted(name for group in groups for name in group.names) == sorted(named)
    for group in groups:
        assert group.lr_multiplier == (3.0 if group.role == "embedding" else 1.0)
        assert {named[name].ndim >= 2 for name in group.names} == {group.weight_decay == 0.2}
        assert {get_parameter_role(name) for name in group.names} == {group.role}
    assert [group.name for group in groups] == [
        "dense without decay",
        "dense",
        "embedding",
        "experts",
    ]


def test_biases_of_experts_are_stacked_and_still_do_not_decay() -> None:
    config = build_tiny_config(
        moe={
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 8,
            "expert": {"kind": "swiglu", "bias": True},
        }
    )
    groups = build_parameter_groups(Transformer(config).named_parameters(), AdamWConfig())
    experts = {group.weight_decay > 0: group.names for group in groups if group.role == "experts"}
    assert all(name.endswith("_proj") for name in experts[True])
    assert all(name.endswith("_bias") for name in experts[False])


def test_a_schedule_of_ones_own_is_a_part_of_the_trajectory(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    text = (ROOT / "launch/commands/templates/schedule.py").read_text()
    own.write_text(text)
    schedule = PythonScheduleConfig(path=f"{own}:Stairs", warmup_tokens=10, options={"steps": 2})
    assert [compute_lr_multiplier(schedule, tokens, 100) for tokens in (5, 10, 49, 50, 100)] == [
        0.5,
        1,
        1,
        0.5,
        0.5,
    ]
    train = {"tokens": 1000, "precision": "fp32"}
    before = run_with(schedule, train=train).trajectory_settings
    own.write_text(text.replace("0.5 **", "0.25 **"))
    assert run_with(schedule, train=train).trajectory_settings != before
    own.write_text(text.replace("return float(", "return -float("))
    load_python_schedule.cache_clear()
    with pytest.raises(
        ConfigError, match=r"own\.py:Stairs gives -1\.0 after 20 tokens, but a multiplier"
    ):
        compute_lr_multiplier(schedule, 20, 100)


def test_rate_times_decay_of_a_matrix_does_not_depend_on_the_parametrization() -> None:
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "parametrization": {"kind": "mup", "base_hidden_size": 32},
    }
    config = build_tiny_config(**sizes)
    groups = build_parameter_groups(
        Transformer(config).named_parameters(), AdamWConfig(weight_decay=0.3), config
    )
    products = {group.lr_multiplier * group.weight_decay for group in groups if group.weight_decay}
    assert products == {0.3}
    assert {group.rate_factor for group in groups} == {0.5, 1.0}
