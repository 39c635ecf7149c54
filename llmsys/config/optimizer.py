"""The optimizer: what an `optimizer:` section can say."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class _BaseOptimizerConfig(Section):
    """What every optimizer has: the rate, weight decay, clipping, and AdamW for what needs it."""

    learning_rate: float = Field(3e-4, gt=0, description="Peak rate; the schedule scales it.")
    embedding_lr_multiplier: float = Field(
        1.0, gt=0, description="Rate of the token embedding and the head, in learning rates; small models like more."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Decay per step of the first and second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decay of matrices, per unit of learning rate; vectors do not.")
    max_grad_norm: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")


class AdamWConfig(_BaseOptimizerConfig):
    """Adam with bias correction and decoupled weight decay (Kingma 2014; Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"


class MuonConfig(_BaseOptimizerConfig):
    """Orthogonal momentum for the matrices of blocks, experts too (Jordan 2024); AdamW for everything else.

    Its steps are scaled to those of AdamW (Moonshot 2025), so rate and decay carry over from one to the other.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = Field(0.95, description="Decay per step of the momentum of matrices.")
    newton_schulz_steps: int = Field(
        5, ge=1, le=20, description="Newton-Schulz steps; each makes the momentum more orthogonal."
    )


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="kind")]
