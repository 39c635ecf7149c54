"""What the torch engine cannot do is refused by name, and under DDP ranks hold copies without
being told.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.run import RunConfig
from llmsys.errors import LayoutError
from llmsys.estimate.state_memory import resolve_planned_layout

DDP: dict[str, Any] = {"kind": "torch", "data_parallel": "ddp"}
MOE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}  # fmt: skip


INT8 = {"kind": "adamw", "moments": "int8"}
NARROW = {
    "vocab_size": 64, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4,
    "intermediate_size": 64,
}  # fmt: skip
LATENT = {
    "kind": "latent", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": DDP, "layout": {"shard": 2}},
         "layout.shard: 2 ranks cannot shard a replica that engine.data_parallel=ddp keeps "
         "unsharded on every rank. Use layout.shard=1, or engine.data_parallel=fsdp."),
        ({"engine": DDP, "layout": {"expert": 2}, "model": MOE},
         "layout.expert: 2 ranks cannot shard the experts of a replica that "
         "engine.data_parallel=ddp keeps unsharded on every rank. Use layout.expert=1, or"),
        ({"engine": DDP, "layout": {"tensor": 2}}, "engine.kind=torch with data_parallel=ddp does "
        "not shard matrices"),
        ({"engine": DDP | {"cpu_offload": "state"}},
         "engine.cpu_offload: state needs FSDP: engine.data_parallel=ddp keeps master weights and "
         "gradients on the compute device. Use engine.cpu_offload=none, or"),
        ({"train": {"activation_checkpoint": "offload"}, "engine": {"kind": "deepspeed"}},
         "train.activation_checkpoint: offload copies each tensor as a block saves it, which "
         "engine.kind=deepspeed decides by itself. Use engine.kind=torch, or "
         "train.activation_checkpoint=selective."),
        ({"train": {"activation_checkpoint": "offload", "compile": "block"}},
         "which train.compile=block decides by itself. Use train.compile=none, or"),
        ({"evaluation": {"sequence_length": 4096}, "batch": {"sequence_length": 2048}},
         "evaluation.sequence_length: 4096 positions exceed the 2048 of a training window"),
        ({"train": {"reproducibility": "bitwise"}, "engine": {"kind": "torch",
            "gradient_accumulation": "whole"}},
         "engine.gradient_accumulation: whole sums over micro-batches before ranks, but "
         "train.reproducibility=bitwise needs its own"),
        ({"train": {"matmul_dtype": "fp8"}, "engine": {"kind": "deepspeed"}},
         "train.matmul_dtype: fp8 is not available: engine.kind=deepspeed does not support fp8 "
         "layers. Use engine.kind=torch, or train.matmul_dtype=compute."),
        ({"train": {"matmul_dtype": "fp8"}, "engine": DDP},
         "ddp casts weights itself. Use engine.data_parallel="),
        ({"train": {"matmul_dtype": "fp8", "precision": "fp16"}},
         "train.precision=fp16 is not the output dtype of fp8 matmuls. Use train.precision=bf16, "
         "or train.matmul_dtype=compute."),
        ({"train": {"expert_matmul_dtype": "fp8_block"}, "engine": DDP, "model": MOE},
         "train.expert_matmul_dtype: fp8_block is not available: engine.data_parallel=ddp casts "
         "weights itself."),
        ({"optimizer": {"kind": "adamw", "moments": "int8"}, "engine": {"kind": "deepspeed"}},
         "optimizer.moments: int8 is not available: DeepSpeed keeps flat float32 shards. Use "
         "engine.kind=torch, or optimizer.moments=fp32."),
        ({"optimizer": {"kind": "adamw", "moments": "bf16"},
            "train": {"reproducibility": "bitwise"}},
         "optimizer.moments: bf16 is not available: train.reproducibility=bitwise rounds nothing "
         "by chance."),
        ({"optimizer": INT8, "layout": {"tensor": 2}, "model": NARROW | {"intermediate_size": 24}},
         "optimizer.moments: int8 has one scale for 8 neighbours, and of the 24 columns of "
         "down_proj (model.intermediate_size) each of tensor=2 ranks has 12. Use layout.tensor=1, "
         "or optimizer.moments=bf16."),
        ({"optimizer": INT8, "layout": {"tensor": 2}, "model": NARROW | {"head_dim": 6}},
         "of the 24 columns of attention.o_proj.weight each of tensor=2 ranks has 12."),
        ({"optimizer": INT8, "layout": {"tensor": 4}, "model": NARROW | {"attention": LATENT}},
         "of the 40 columns of attention.o_proj.weight each of tensor=4 ranks has 10."),
    ],
)  # fmt: skip
def test_choices_that_do_not_go_together_say_what_does(
    sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(sections)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "on_accelerators"),
    [({}, "block"), ({"engine": {"kind": "deepspeed"}}, "none"), ({"train": {"compile": "none"}},
        "none"),
     ({"engine": DDP}, "block"), ({"layout": {"context": 2}}, "block"),
     ({"layout": {"context": 2, "context_kind": "ring"}}, "block"),
     ({"train": {"activation_checkpoint": "offload"}}, "none"),
     ({"train": {"reproducibility": "bitwise", "threads_per_process": 1},
         "batch": {"micro_sequences": 1}}, "none")],
)  # fmt: skip
def test_blocks_are_compiled_by_default_where_triton_can(
    sections: dict[str, Any], on_accelerators: str
) -> None:
    config = RunConfig.model_validate(sections)
    assert config.resolve_compile(has_triton=True).train.compile == on_accelerators
    assert config.resolve_compile(has_triton=False).train.compile == "none"


@pytest.mark.parametrize("layout", [{}, {"shard": 1}, {"replicate": 4}])
def test_ranks_of_ddp_hold_copies(layout: dict[str, int]) -> None:
    fitted = RunConfig.model_validate({"engine": DDP, "layout": layout}).resolve_layout(4)
    assert (fitted.replicate, fitted.shard, fitted.data_parallel_size) == (4, 1, 4)
    assert fitted.get_data_rank(3) == 3


def test_copies_that_are_not_as_many_as_the_ranks_are_refused() -> None:
    config = RunConfig.model_validate({"engine": DDP, "layout": {"replicate": 2}})
    message = (
        r"replicate=2 replicas do not fit 4 ranks: with engine.data_parallel=ddp every rank holds "
        r"one replica\. Leave"
    )
    with pytest.raises(LayoutError, match=message):
        config.resolve_layout(4)


def test_shards_stay_shards_under_fsdp() -> None:
    fitted = RunConfig.model_validate({"layout": {"replicate": 2}}).resolve_layout(4)
    assert (fitted.replicate, fitted.shard) == (2, 2)


@pytest.mark.parametrize(("layout", "ranks"), [({}, 3), ({"shard": 1}, 3), ({"replicate": 2}, 2)])
def test_the_estimate_plans_as_many_copies_as_there_will_be(
    layout: dict[str, int], ranks: int
) -> None:
    config = RunConfig.model_validate({"engine": DDP, "layout": layout, "launch": {"processes": 3}})
    assert resolve_planned_layout(config).replicate == ranks


def test_the_dtype_of_matmuls_is_part_of_the_trajectory() -> None:
    fp8 = RunConfig.model_validate({"train": {"matmul_dtype": "fp8", "precision": "bf16"}})
    assert fp8.trajectory_settings["train"]["matmul_dtype"] == "fp8"
    assert (
        RunConfig().resolve_precision("bf16").trajectory_settings["train"]["matmul_dtype"]
        == "compute"
    )


@pytest.mark.parametrize("kind", ["ntk", "longrope"])
def test_a_rotation_by_the_length_of_a_row_is_refused_where_rows_are_padded(kind: str) -> None:
    scaling: dict[str, Any] = {"kind": kind, "original_max_position_embeddings": 16}
    if kind == "ntk":
        scaling["factor"] = 2.0
    else:
        scaling |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "position": {"kind": "rope", "scaling": scaling},
    }  # fmt: skip
    padded: list[dict[str, Any]] = [
        {"model": model | {"family": "encoder_decoder"}, "batch": {"sequence_length": 32}},
        {
            "model": model
            | {"family": "encoder", "head": {"kind": "classification", "num_labels": 2}},
            "objective": {"kind": "classification"},
            "batch": {"sequence_length": 32},
        },
    ]
    for sections in padded:
        with pytest.raises(ValidationError, match=f"{kind} rotates by the length of a row beyond"):
            RunConfig.model_validate(sections)
        # Up to there every row has one rotation.
        RunConfig.model_validate(sections | {"batch": {"sequence_length": 16}})
    RunConfig.model_validate({"model": model, "batch": {"sequence_length": 32}})


def test_whole_blocks_of_moments_on_every_tensor_rank_are_taken() -> None:
    for tensor in (1, 2, 4):
        RunConfig.model_validate({"optimizer": INT8, "layout": {"tensor": tensor}, "model": NARROW})
