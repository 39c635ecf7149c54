"""Configuration of the engine (`engine:`), the library that runs backward, clipping and the
optimizer step.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.section import Section


class _BaseEngineConfig(Section):
    """Base of the engines: every rank keeps all state (DDP)."""

    offloads_gradients: ClassVar[bool] = False  # CPU offload includes gradients

    @property
    def can_reduce_each_micro_batch(self) -> bool:
        """The gradient of one micro-batch can be had, summed over ranks."""
        return False

    @property
    def overlaps_messages(self) -> bool:
        """Messages of gradients and weights travel while other layers are computed."""
        return True

    @property
    def keeps_weights_in_micro_batch(self) -> bool:
        """Weights that are gathered in a forward are kept for its backward."""
        return False

    @property
    def keeps_weights_in_step(self) -> bool:
        """Weights that are gathered once are kept for all micro-batches of a step."""
        return False

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of the messages in which gradients are summed over ranks."""
        return 4

    @property
    def title(self) -> str:
        """Kind of the engine, as a message names it."""
        return str(getattr(self, "kind", ""))

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
    """Native PyTorch: FSDP2 shards weights, gradients and moments over the shard axis; DDP
    replicates them; plain keeps whole weights and shards masters and moments.
    """

    kind: Literal["torch"] = "torch"
    offloads_gradients: ClassVar[bool] = True
    data_parallel: Literal["auto", "fsdp", "ddp", "plain"] = Field(
        "auto",
        description="fsdp: shard parameters, gradients and moments over the shard axis. ddp: "
        "replicate them on every rank. plain: whole weights without a wrapper; masters and "
        "moments are sharded, and gradients reduced once per step. auto: plain on up to eight "
        "ranks of a machine where it fits and nothing forbids it, else fsdp.",
    )
    cpu_offload: Literal["none", "state"] = Field(
        "none",
        description="state: keep master weights, gradients and moments in host memory and run the "
        "optimizer there.",
    )
    gradient_accumulation: Literal["sharded", "whole"] = Field(
        "sharded",
        description="Gradient accumulation under fsdp. sharded: reduce-scatter after each "
        "micro-batch. whole: accumulate unsharded fp32 gradients and reduce once per step.",
    )
    reshard: Literal["after_forward", "never", "after_step"] = Field(
        "after_forward",
        description="When fsdp frees gathered weights. after_forward: after the forward of a "
        "block; they are gathered again for its backward. never: not between the forward and "
        "backward of a micro-batch. after_step: in the last backward of a step.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="Number type in which fsdp sums gradients over ranks. bf16 halves the messages "
        "and rounds each sum; micro-batches are added in fp32.",
    )

    @property
    def title(self) -> str:
        """`torch` with its kind of data parallelism. `auto` is fsdp wherever plain is refused."""
        return f"torch with data_parallel={'fsdp' if self.is_fsdp else self.data_parallel}"

    @property
    def is_fsdp(self) -> bool:
        """FSDP2 shards the weights; `auto` counts as fsdp until it is resolved."""
        return self.data_parallel in ("fsdp", "auto")

    @property
    def can_reduce_each_micro_batch(self) -> bool:
        """The gradient of one micro-batch can be had, summed over ranks: not under DDP."""
        return self.data_parallel != "ddp"

    @property
    def keeps_weights_in_micro_batch(self) -> bool:
        """Weights that are gathered in a forward are kept for its backward."""
        return self.reshard != "after_forward"

    @property
    def keeps_weights_in_step(self) -> bool:
        """Weights that are gathered once are kept for all micro-batches of a step."""
        return self.reshard == "after_step"

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of the messages in which gradients are summed over ranks."""
        return 4 if self.reduce_dtype == "fp32" else 2

    @property
    def overlaps_messages(self) -> bool:
        """Messages travel while layers are computed: not those of plain, between two steps."""
        return self.data_parallel != "plain"

    @property
    def shards_optimizer_state(self) -> bool:
        """Master weights and moments are sharded: not under DDP."""
        return self.data_parallel != "ddp"

    @property
    def shards_weights(self) -> bool:
        """Weights are sharded: under FSDP."""
        return self.is_fsdp

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Gradients are reduced after each micro-batch: under FSDP with sharded accumulation."""
        return self.is_fsdp and self.gradient_accumulation == "sharded"


class DeepSpeedEngineConfig(_BaseEngineConfig):
    """DeepSpeed ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054)."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2, 3] = Field(
        2,
        description="ZeRO stage. 0: no sharding. 1: shard master weights and moments. 2: also "
        "gradients. 3: also weights.",
    )
    cpu_offload: Literal["none", "optimizer"] = Field(
        "none",
        description="optimizer: keep master weights and moments in host memory and run the "
        "optimizer there.",
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
