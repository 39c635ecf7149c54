"""The engine: which library owns backward, clipping and the optimizer step."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class TorchEngineConfig(Section):
    """PyTorch itself: FSDP2 splits weights, gradients and moments over the shard axis, DDP copies them to all ranks."""

    kind: Literal["torch"] = "torch"
    data_parallel: Literal["fsdp", "ddp"] = Field(
        "fsdp", description="fsdp splits what the shard axis spans; ddp keeps everything whole on each rank."
    )
    cpu_offload: Literal["none", "state"] = Field(
        "none", description="state: masters, gradients and moments live in host memory, and the step runs there."
    )
    gradient_accumulation: Literal["sharded", "whole"] = Field(
        "sharded",
        description="Where gradients of several micro-batches add up under fsdp: sharded sums over ranks after each; "
        "whole keeps them in fp32 on every rank and sums over ranks once a step.",
    )


class DeepSpeedEngineConfig(Section):
    """DeepSpeed's ZeRO (Rajbhandari 2019)."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="What is split over the ranks: 0 nothing, 1 masters and moments, 2 gradients too, 3 weights too."
    )
    cpu_offload: Literal["none", "optimizer"] = Field(
        "none", description="optimizer: masters and moments live in host memory, and the step runs there."
    )


class AccelerateEngineConfig(Section):
    """Hugging Face accelerate, with whatever the user's accelerate config says."""

    kind: Literal["accelerate"] = "accelerate"


EngineConfig = Annotated[
    TorchEngineConfig | DeepSpeedEngineConfig | AccelerateEngineConfig, Field(discriminator="kind")
]
