"""Bytes of state equal what the sharded module holds, and the estimate's text and data say the
same.
"""

from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from llmsys.config.loading.load import load_run_config
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import LayoutError
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.peak_memory import estimate_activation_bytes
from llmsys.estimate.run_estimate import estimate_run
from llmsys.estimate.state_memory import compute_state_bytes, resolve_planned_layout
from llmsys.estimate.summary_table import format_count, format_estimate
from llmsys.launch.main import main
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.parallelize import apply_expert_parallel, apply_fsdp
from tests.helpers.fake_ranks import pretend_ranks
from tests.helpers.model_sections import SHAPE, VARIANTS

MODEL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "first_dense_layers": 1,
    },
}


def run_config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"model": MODEL, "train": {"precision": "bf16"}, **sections})


def test_weights_in_the_compute_dtype_take_four_bytes_in_fp32_and_two_in_bf16() -> None:
    engine, layout = (
        {"kind": "deepspeed", "zero_stage": 1},
        ParallelLayout().resolve(1, run_config().model),
    )
    sizes = {
        precision: compute_state_bytes(
            run_config(engine=engine, train={"precision": precision}), layout
        )
        for precision in ("fp32", "bf16")
    }
    assert sizes["fp32"].weights == sizes["fp32"].masters == 2 * sizes["bf16"].weights


def held_by_rank_0(config: RunConfig) -> int:
    """Parameter elements of the sharded module on the first of the ranks that its layout wants."""
    fitted = resolve_planned_layout(config)
    with pretend_ranks(fitted.world_size):
        with torch.device("meta"):
            model = Transformer(config.model)
        meshes = build_device_meshes(fitted, torch.device("cpu"))
        apply_expert_parallel(model, meshes)
        apply_fsdp(model, meshes, torch.bfloat16)
        return sum(
            one.to_local().numel() if isinstance(one, DTensor) else one.numel()
            for one in model.parameters()
        )


@pytest.mark.parametrize(
    "layout",
    [
        (1, 1, 1),
        (1, 2, 1),
        (1, 4, 1),
        (2, 3, 1),
        (1, 8, 1),
        (1, 2, 2),
        (1, 6, 2),
        (2, 6, 3),
        (1, 16, 2),
    ],
    ids=str,
)
def test_fsdp_state_equals_what_rank_0_holds(layout: tuple[int, int, int]) -> None:
    replicate, shard, expert = layout
    config = run_config(layout={"replicate": replicate, "shard": shard, "expert": expert})
    held, state = (
        held_by_rank_0(config),
        compute_state_bytes(config, resolve_planned_layout(config)),
    )
    assert (state.weights, state.masters, state.gradients, state.moments) == (
        0,
        4 * held,
        4 * held,
        8 * held,
    )


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_architecture_is_held_as_estimated(changes: dict[str, Any]) -> None:
    layout = {"shard": 4, "expert": 2 if changes.get("moe") else 1}
    mixes = ModelConfig.model_validate(SHAPE | changes).mixes_documents
    batch = {"sequence_length": 16, "attention_scope": "window" if mixes else "document"}
    config = RunConfig.model_validate({"model": SHAPE | changes, "layout": layout, "batch": batch})
    assert compute_state_bytes(
        config, resolve_planned_layout(config)
    ).masters == 4 * held_by_rank_0(config)


@pytest.mark.parametrize(("stage", "bytes_each"), [(1, (2, 2, 4, 4)), (2, (2, 2, 2, 4))])
def test_zero_splits_masters_moments_and_then_gradients(
    stage: int, bytes_each: tuple[int, ...]
) -> None:
    config = run_config(engine={"kind": "deepspeed", "zero_stage": stage}, layout={"shard": 2})
    count = count_parameters(config.model).total
    state = compute_state_bytes(config, resolve_planned_layout(config))
    expected = [count * each for each in bytes_each]
    assert [state.weights, state.masters, state.gradients, state.moments] == pytest.approx(
        expected, rel=1e-3
    )


def test_dealt_experts_are_held_by_their_rank_alone() -> None:
    together, dealt = (
        run_config(
            engine={"kind": "deepspeed", "zero_stage": 1}, layout={"shard": 2, "expert": expert}
        )
        for expert in (1, 2)
    )
    experts = count_parameters(together.model).by_component["experts"]
    less = (
        compute_state_bytes(together, resolve_planned_layout(together)).weights
        - compute_state_bytes(dealt, resolve_planned_layout(dealt)).weights
    )
    assert less == 2 * experts // 2


def test_activations_follow_the_micro_batch() -> None:
    whole, half = (run_config(batch={"sequences": 8, "micro_sequences": micro}) for micro in (0, 4))
    layout = resolve_planned_layout(whole)
    big, small = estimate_activation_bytes(whole, layout), estimate_activation_bytes(half, layout)
    assert (big.logits, big.gathered) == (2 * small.logits, small.gathered)
    # the router's weight does not grow
    assert big.blocks == pytest.approx(2 * small.blocks, rel=1e-3)


def test_the_layout_is_that_of_the_processes_to_be_started() -> None:
    assert resolve_planned_layout(run_config(launch={"processes": 4})) == ParallelLayout(
        replicate=1, shard=4
    )
    assert resolve_planned_layout(run_config(layout={"replicate": 2, "shard": 3})).world_size == 6
    with pytest.raises(LayoutError, match=r"2 ranks cannot be split into replicate=3"):
        resolve_planned_layout(run_config(launch={"processes": 2}, layout={"replicate": 3}))


def test_the_stable_keys_are_there_and_consistent() -> None:
    config = load_run_config(
        "train/demo", ["flops.convention=full", "batch.sequences=4", "batch.sequence_length=256"]
    )
    result = estimate_run(config).model_dump(mode="json", exclude_unset=True)
    counts = count_parameters(config.model)
    assert result["parameters"]["total"] == counts.total
    assert result["parameters"]["non_embedding"] == counts.non_embedding
    assert list(result["parameters"]["active"]) == [
        "all",
        "without_input_embedding",
        "without_embeddings",
    ]
    assert result["flops"]["convention"] == "full"
    assert result["flops"]["forward_backward"] == 3 * result["flops"]["forward"]
    assert result["flops"]["forward"] == result["flops"]["conventions"]["full"]["forward"]
    assert result["run"]["flops"] == result["run"]["steps"] * result["flops"]["forward_backward"]
    assert result["run"]["tokens"] == result["run"]["steps"] * 4 * 256
    assert set(result["unknown"]) == {"time", "money", "energy"}


def test_the_demo_model_has_about_ten_million_parameters_in_eight_experts() -> None:
    model = load_run_config("train/demo").model
    assert 8_000_000 < count_parameters(model).total < 12_500_000
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.num_experts_per_tok, model.moe.num_shared_experts) == (
        8,
        2,
        1,
    )


def test_the_text_names_total_unknowns_and_every_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "model/demo-moe", "--explain"]) == 0
    text = capsys.readouterr().out
    total = f"{count_parameters(load_run_config('train/demo').model).total:,}"
    assert text.count(total) == 2
    assert "time, money, energy: unknown (needs a device: --device NAME" in text
    assert "blocks.{0..3}.feed_forward.experts.gate_proj" in text
    assert "steps" not in text  # a bare model has no run


def test_every_model_of_the_config_has_an_estimate() -> None:
    dense = ModelConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    assert "state per rank" in format_estimate(estimate_run(RunConfig(model=dense)))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (9_971_968, "9.97M"),
        (8_030_261_248, "8.03B"),
        (4.1e13, "41T"),
        (3.1e18, "3.1e+18"),
    ],
)
def test_counts_have_prefixes_people_know(count: float, text: str) -> None:
    assert format_count(count) == text
