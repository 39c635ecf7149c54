"""How a training program uses a device, as far as time depends on it: what is fused, hidden, launched.

One noun with a few named instances: what this repository runs, and the generations of programs behind published
measurements. Every field is a physical quantity; none is fitted to a single row.
"""

from typing import Literal

from pydantic import Field

from llmsys.config.base import Section
from llmsys.config.run import RunConfig

Number = Literal["fp32", "bf16", "fp16", "fp8"]


class SoftwareProfile(Section):
    """A generation of programs. The defaults are those of fused kernels with overlapped collectives."""

    name: str = Field(min_length=1, description="What reports call it.")
    traffic: float = Field(1.0, ge=1, description="Bytes that elementwise kernels move, over those of fused ones.")
    loss_bytes: float = Field(12, ge=0, description="Bytes moved per logit in the loss, forward and backward.")
    attention: Literal["fused", "native", "unfused"] = Field(
        "fused",
        description="fused: torch's kernels; native: kernels for this device; unfused writes every score to memory.",
    )
    context: Literal["heads", "ring"] = Field(
        "heads", description="How the context axis shares attention; on a ring the last rank has the most to do."
    )
    launch: Literal["eager", "compiled"] = Field("compiled", description="eager: the host starts every kernel.")
    matmul_dtype: Number | None = Field(None, description="Number type of products inside blocks; null: the run's.")
    scales: Literal["tensor", "row"] = Field("tensor", description="What shares one scale in 8 bits; rows cost more.")
    activations: Literal["device", "host"] = Field("device", description="host: block inputs wait in host memory.")
    recomputed_matmuls: float = Field(
        0.0, ge=0, le=1, description="Share of a block's products that selective recomputation repeats."
    )
    data_overlap: float = Field(
        0.8, ge=0, le=1, description="Share of the traffic of weights and gradients that compute can hide."
    )
    tensor_overlap: float = Field(0.0, ge=0, le=1, description="Share of the tensor axis' traffic that is hidden.")
    expert_overlap: float = Field(0.0, ge=0, le=1, description="Share of the expert axis' traffic that is hidden.")


EAGER = SoftwareProfile(name="eager", traffic=1.8, loss_bytes=28, launch="eager")
COMPILED = SoftwareProfile(name="compiled")


def build_software_profile(config: RunConfig) -> SoftwareProfile:
    """What this repository's trainer is under that config. Its loss goes over the logits in chunks, fused or not."""
    if config.train.compile == "block":
        return COMPILED
    return EAGER.model_copy(update={"loss_bytes": 16.0})
