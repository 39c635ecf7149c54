"""Factors on the outputs of projections (`model.multipliers`): µP as it was published, with factors
in the model instead of in initial values and learning rates (Yang 2022, arXiv:2203.03466, table 8;
Falcon-H1).
"""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from llmsys.config.section import Section
from llmsys.errors import Violation

Factor = Annotated[float, Field(gt=0)]


class AttentionMultipliersConfig(Section):
    """Factors in `model.attention`."""

    q_proj: Factor = Field(1.0, description="On queries.")
    k_proj: Factor = Field(1.0, description="On keys.")
    v_proj: Factor = Field(1.0, description="On values.")
    o_proj: Factor = Field(1.0, description="On the output.")


class LinearAttentionMultipliersConfig(AttentionMultipliersConfig):
    """Factors in `model.linear_attention`; queries, keys and values are those before the
    convolution.
    """

    g_proj: Factor = Field(1.0, description="On gates of outputs.")
    a_proj: Factor = Field(1.0, description="On decays, or on steps.")


class FeedForwardMultipliersConfig(Section):
    """Factors in dense feed-forwards."""

    gate_proj: Factor = Field(1.0, description="On the gate, before its activation.")
    up_proj: Factor = Field(1.0, description="On the channels that it gates.")
    down_proj: Factor = Field(1.0, description="On the output.")


class MultipliersConfig(Section):
    """Factors on the outputs of projections, biases included."""

    attention: AttentionMultipliersConfig = Field(
        AttentionMultipliersConfig(), description="Of full and sliding attention."
    )
    linear_attention: LinearAttentionMultipliersConfig = Field(
        LinearAttentionMultipliersConfig(), description="Of linear attention."
    )
    feed_forward: FeedForwardMultipliersConfig = Field(
        FeedForwardMultipliersConfig(), description="Of dense feed-forwards."
    )

    def iter_factors(self) -> Iterator[tuple[str, str, float]]:
        """Yield section, projection and factor, as far as it is not 1."""
        for section, factors in self:
            yield from ((section, name, factor) for name, factor in factors if factor != 1.0)

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield factors on projections that a model does not have, with keys below `model`.

        Args:
            model: its fields.
        """
        feed_forward, linear = model["feed_forward"], model["linear_attention"]
        given = dict.fromkeys(type(self).model_fields, "")
        if model["attention"].kind != "multi_head":
            kind = model["attention"].kind
            given["attention"] = f"attention.kind={kind} has other projections"
        if linear is None:
            given["linear_attention"] = "no layer has linear attention"
        elif linear.kind == "kimi_delta":
            given["linear_attention"] = "linear_attention.kind=kimi_delta has other projections"
        if model["moe"] is not None or feed_forward.kind == "python":
            given["feed_forward"] = "it is proven with dense feed-forwards that are built in"
        if model["family"] != "decoder" or model["parametrization"].kind != "standard":
            why = "it is proven with family=decoder and parametrization.kind=standard"
            given = dict.fromkeys(given, why)
        for section, name, factor in self.iter_factors():
            why = given[section]
            if name == "gate_proj" and not why and not feed_forward.is_gated:
                why = "the feed-forward has no gate"
            if why:
                yield Violation(
                    f"multipliers.{section}.{name}", f"{factor} has no effect: {why}. Leave it out."
                )
