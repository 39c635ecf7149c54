"""Configuration of the engine (`engine:`), the library that runs backward, clipping and the optimizer step."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.section import Section


class _BaseEngineConfig(Section):
    """Base of the engines: every rank keeps all state (DDP)."""

    offloads_gradients: ClassVar[bool] = False  # CPU offload includes gradients

    @property
    def shards_optimizer_state(self) -> bool:
        """Master weights and moments are sharded over the data-parallel ranks."""
        return False

    @property
    def shards_weights(self) -> bool:
        """Weights are sharded over the data-parallel ranks and gathered for use."""
        return False

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Gradients are reduced after each micro-batch, not once per step."""
        return False


class TorchEngineConfig(_BaseEngineConfig):
    """Native PyTorch: FSDP2 shards weights, gradients and moments over the shard axis; DDP replicates them."""

    kind: Literal["torch"] = "torch"
    offloads_gradients: ClassVar[bool] = True
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

    @property
    def shards_optimizer_state(self) -> bool:
        """Master weights and moments are sharded: under FSDP."""
        return self.data_parallel == "fsdp"

    @property
    def shards_weights(self) -> bool:
        """Weights are sharded: under FSDP."""
        return self.data_parallel == "fsdp"

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Gradients are reduced after each micro-batch: under FSDP with sharded accumulation."""
        return self.data_parallel == "fsdp" and self.gradient_accumulation == "sharded"


class DeepSpeedEngineConfig(_BaseEngineConfig):
    """DeepSpeed ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2, description="What is split over the ranks: 0 nothing, 1 masters and moments, 2 gradients too, 3 weights too."
    )
    cpu_offload: Literal["none", "optimizer"] = Field(
        "none", description="optimizer: masters and moments live in host memory, and the step runs there."
    )

    @property
    def shards_optimizer_state(self) -> bool:
        """Master weights and moments are sharded: from stage 1."""
        return self.zero_stage >= 1

    @property
    def shards_weights(self) -> bool:
        """Weights are sharded: stage 3."""
        return self.zero_stage == 3

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Gradients are reduced after each micro-batch: from stage 2."""
        return self.zero_stage >= 2


class AccelerateEngineConfig(_BaseEngineConfig):
    """Hugging Face Accelerate with the user's accelerate config."""

    kind: Literal["accelerate"] = "accelerate"


EngineConfig = Annotated[
    TorchEngineConfig | DeepSpeedEngineConfig | AccelerateEngineConfig, Field(discriminator="kind")
]
