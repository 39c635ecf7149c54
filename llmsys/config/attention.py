"""How tokens look at each other: the kinds of `model.attention`.

Head counts and widths are ModelConfig's own fields, under Hugging Face's names; here is what differs between families.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class MultiHeadAttentionConfig(Section):
    """Queries, keys and values from one linear map each; fewer key-value heads than heads make it GQA or MQA."""

    kind: Literal["multi_head"] = "multi_head"
    qkv_bias: bool = Field(False, description="Whether the maps of queries, keys and values have a bias.")
    output_bias: bool = Field(False, description="Whether the map of the output has a bias.")
    qk_norm: Literal["none", "head", "full"] = Field(
        "none", description="Norm of queries and keys: of each head (Qwen3), or over all heads at once (OLMo 2)."
    )
    scale: float | None = Field(None, gt=0, description="Factor on the scores; null: 1 / sqrt(head_dim). T5: 1.")
    logit_softcap: float | None = Field(None, gt=0, description="Scores become cap · tanh(score / cap) (Gemma 2).")
    sinks: bool = Field(False, description="Whether each head has a trained score that takes weight (gpt-oss).")
    clip: float | None = Field(None, gt=0, description="Queries, keys and values are cut to ±clip (DBRX, OLMoE).")


class LatentAttentionConfig(Section):
    """Keys and values from one small latent vector, which is all a cache must keep (MLA; DeepSeek-V2, 2.1)."""

    kind: Literal["latent"] = "latent"
    q_lora_rank: int | None = Field(None, ge=1, description="Width of the queries' latent; null: one plain map.")
    kv_lora_rank: int = Field(512, ge=1, description="Width of the latent of keys and values.")
    qk_nope_head_dim: int = Field(128, ge=1, description="Channels of a head that are not rotated.")
    qk_rope_head_dim: int = Field(64, ge=2, description="Channels that are rotated; one key part serves all heads.")
    v_head_dim: int = Field(128, ge=1, description="Channels of a head's value.")
    bias: bool = Field(False, description="Whether the maps into the latents and of the output have a bias.")
    norm_eps: float = Field(1e-6, gt=0, description="eps of the norms of the latents.")
    scale: float | None = Field(None, gt=0, description="Factor on the scores; null: 1 / sqrt(nope + rope).")


AttentionConfig = Annotated[MultiHeadAttentionConfig | LatentAttentionConfig, Field(discriminator="kind")]
