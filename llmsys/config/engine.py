"""The engine: which library owns backward, clipping and the optimizer step."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.base import Section


class Torch(Section):
    """FSDP2 of PyTorch: weights, gradients and moments are split over the shard axis, experts over the expert axis."""

    kind: Literal["torch"] = "torch"


class Deepspeed(Section):
    """DeepSpeed's ZeRO (Rajbhandari 2019)."""

    kind: Literal["deepspeed"] = "deepspeed"
    zero_stage: Literal[1, 2] = Field(
        2, description="What is split over the ranks: 1 masters and moments, 2 gradients as well."
    )


EngineConfig = Annotated[Torch | Deepspeed, Field(discriminator="kind")]
