"""The engine: which library owns backward, clipping and the optimizer step."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.base import Section


class TorchEngine(Section):
    """FSDP2 of PyTorch: weights, gradients and moments are split over the shard axis, experts over the expert axis."""

    kind: Literal["torch"] = "torch"


class DeepspeedEngine(Section):
    """DeepSpeed's ZeRO (Rajbhandari 2019)."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[0, 1, 2] = Field(
        2, description="What is split over the ranks: 0 nothing, 1 masters and moments, 2 gradients as well."
    )


EngineConfig = Annotated[TorchEngine | DeepspeedEngine, Field(discriminator="kind")]
