"""Position encodings: the kinds of `model.position`, and the scalings of RoPE to longer contexts.

Each kind lists its parameters, its matmuls and the tensors that it saves for backward. The modules
are in llmsys/model.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, TypeGuard, assert_never

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import ActivationShape, ParameterTensor, SavedTensor, ScoreShape
from llmsys.config.section import Section
from llmsys.errors import Violation


class NoRopeScaling(Section):
    """Unscaled RoPE frequencies."""

    kind: Literal["none"] = "none"


class LinearRopeScalingConfig(Section):
    """Positions are divided by `factor` (Chen 2023, position interpolation)."""

    kind: Literal["linear"] = "linear"
    factor: float = Field(ge=1, description="Ratio of the new context length to the original.")


class NtkRopeScalingConfig(Section):
    """The base grows with the sequence beyond the trained length ("dynamic NTK"; Hugging Face's
    `dynamic`).

    Cached keys keep the rotation of the length at which they were computed. Generation beyond the
    trained length therefore differs slightly with and without a cache. The same holds for longrope
    where it changes its list.
    """

    kind: Literal["ntk"] = "ntk"
    factor: float = Field(ge=1, description="Growth rate of the base beyond the original context.")
    original_max_position_embeddings: int = Field(
        ge=1, description="Context length of the original training, in positions."
    )


class YarnRopeScalingConfig(Section):
    """Low frequencies are interpolated, high ones unchanged, attention is sharpened slightly
    (Peng 2023, YaRN).
    """

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1, description="Ratio of the new context length to the original.")
    original_max_position_embeddings: int = Field(
        ge=1, description="Context length of the original training, in positions."
    )
    beta_fast: float = Field(
        32.0,
        gt=0,
        description="Frequencies with more rotations than this over the original context are kept.",
    )
    beta_slow: float = Field(
        1.0,
        gt=0,
        description="Frequencies with fewer rotations than this over the original context are "
        "interpolated.",
    )
    attention_factor: float | None = Field(
        None,
        gt=0,
        description="Scale of cosines and sines. null: 0.1·ln(factor) + 1, or derived from mscale.",
    )
    mscale: float | None = Field(
        None, description="As DeepSeek: the scale is m(mscale) / m(mscale_all_dim)."
    )
    mscale_all_dim: float | None = Field(None, description="As DeepSeek; see mscale.")
    truncate: bool = Field(
        True, description="Round the limits of the ramp to whole channels; gpt-oss: false."
    )


class Llama3RopeScalingConfig(Section):
    """Frequencies with wavelengths beyond the old context are divided by `factor`, with a smooth
    ramp (Llama 3.1).
    """

    kind: Literal["llama3"] = "llama3"
    factor: float = Field(ge=1, description="Divisor of the lowest frequencies.")
    low_freq_factor: float = Field(
        1.0, gt=0, description="Start of the transition, in wavelengths per original context."
    )
    high_freq_factor: float = Field(
        4.0, gt=0, description="End of the transition, in wavelengths per original context."
    )
    original_max_position_embeddings: int = Field(
        ge=1, description="Context length of the original training, in positions."
    )


class LongRopeScalingConfig(Section):
    """One divisor per frequency, with separate lists for short and long sequences (Ding 2024,
    LongRoPE; Phi).
    """

    kind: Literal["longrope"] = "longrope"
    original_max_position_embeddings: int = Field(
        ge=1, description="Maximum length for which short_factor is used, in positions."
    )
    short_factor: tuple[float, ...] = Field(
        description="Divisor of each frequency, for short sequences."
    )
    long_factor: tuple[float, ...] = Field(
        description="Divisor of each frequency, for long sequences."
    )
    short_mscale: float | None = Field(
        None, gt=0, description="Scale of cosines and sines. null: the paper's formula."
    )
    long_mscale: float | None = Field(
        None, gt=0, description="Scale of cosines and sines for long sequences."
    )


ScalingConfig = Annotated[
    NoRopeScaling
    | LinearRopeScalingConfig
    | NtkRopeScalingConfig
    | YarnRopeScalingConfig
    | Llama3RopeScalingConfig
    | LongRopeScalingConfig,
    Field(discriminator="kind"),
]


class _BasePositionConfig(Section):
    """A position encoding without parameters, matmuls or saved tensors."""

    # attention adds a table of numbers by distance to the scores
    has_score_table: ClassVar[bool] = False
    has_trained_scores: ClassVar[bool] = False  # what is added to the scores has a gradient

    def iter_embedding_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters that are added to the token embedding."""
        yield from ()

    def iter_stack_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters that all attention layers of a stack share."""
        yield from ()

    def iter_attention_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters that each self-attention layer has for positions."""
        yield from ()

    def count_query_products(self, distance_pairs: int, length: int) -> int:
        """Return the number of query-length dot products that one head computes for positions.

        Args:
            distance_pairs: pairs of a query and a distance that are counted.
            length: positions of the sequence.
        """
        return 0

    def iter_saved_tensors(
        self, scores: ScoreShape, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield the tensors that one attention layer saves for positions."""
        yield from ()

    def find_violations(
        self, model: ModelShape, rotated: int, *, is_latent: bool
    ) -> Iterator[Violation]:
        """Yield what does not fit the model's widths, with keys below `model`.

        Args:
            model: widths of the model.
            rotated: channels per head that RoPE rotates.
            is_latent: attention is latent.
        """
        yield from ()


def is_length_dependent(
    scaling: ScalingConfig,
) -> TypeGuard[NtkRopeScalingConfig | LongRopeScalingConfig]:
    """Return whether a row is rotated by its length, and not by its positions alone.

    Args:
        scaling: the `model.position.scaling:` section.

    Returns:
        True for dynamic NTK and LongRoPE.
    """
    match scaling:
        case NtkRopeScalingConfig() | LongRopeScalingConfig():
            return True
        case (
            NoRopeScaling()
            | LinearRopeScalingConfig()
            | YarnRopeScalingConfig()
            | Llama3RopeScalingConfig()
        ):
            return False
        case unreachable:
            assert_never(unreachable)


class RopeConfig(_BasePositionConfig):
    """Queries and keys are rotated by an angle that grows with the position (Su 2021)."""

    kind: Literal["rope"] = "rope"
    theta: float = Field(
        10000.0,
        gt=0,
        description="Base of the frequencies; the longest wavelength is 2·pi·theta positions.",
    )
    fraction: float = Field(
        1.0, gt=0, le=1, description="Share of a head's channels to rotate, from the first."
    )
    pairing: Literal["halves", "neighbours"] = Field(
        "halves",
        description="Pairing of rotated channels: i with i + half (Llama), or adjacent channels "
        "(GPT-J, DeepSeek, GLM).",
    )
    scaling: ScalingConfig = Field(
        NoRopeScaling(), description="Scaling of the frequencies for longer contexts."
    )
    sliding_theta: float | None = Field(
        None,
        gt=0,
        description="Base in sliding-window layers, without scaling (Gemma 3). null: theta and "
        "scaling in all layers.",
    )
    layers: tuple[bool, ...] = Field(
        (True,),
        min_length=1,
        description="Layers that rotate, repeated over the depth (SmolLM3: three of four).",
    )

    def find_violations(
        self, model: ModelShape, rotated: int, *, is_latent: bool
    ) -> Iterator[Violation]:
        """Yield an odd number of channels, and lists of divisors of another length than the
        frequencies.
        """
        if rotated % 2 and is_latent:
            yield Violation(
                "attention.qk_rope_head_dim",
                f"{rotated} is odd, but rope rotates pairs. Use {rotated + 1}.",
            )
        elif rotated % 2 and self.fraction == 1:
            yield Violation(
                "head_dim",
                f"{rotated} is odd, but rope rotates pairs of channels. Use {rotated + 1}, or "
                "position.kind=none.",
            )
        elif rotated % 2:
            yield Violation(
                "position.fraction",
                f"{self.fraction} of {model.head_dim} channels are {rotated}, but rope rotates "
                f"pairs of channels. Use {(rotated + 1) / model.head_dim}.",
            )
        if isinstance(self.scaling, LongRopeScalingConfig):
            for name in ("short_factor", "long_factor"):
                if (given := len(getattr(self.scaling, name))) != rotated // 2:
                    yield Violation(
                        f"position.scaling.{name}",
                        f"{given} divisors for {rotated // 2} frequencies. Give {rotated // 2}.",
                    )


class LearnedPositionConfig(_BasePositionConfig):
    """A trained vector for each position is added to the token embedding."""

    kind: Literal["learned"] = "learned"
    offset: int = Field(
        0, ge=0, description="Unused rows before position 0 (OPT, RoBERTa, BART: 2)."
    )

    def iter_embedding_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the table of positions."""
        rows = model.max_position_embeddings + self.offset
        yield ParameterTensor("positions.weight", (rows, model.hidden_size), "positions")


class SinusoidalPositionConfig(_BasePositionConfig):
    """sin and cos of pos / 10000^(2i/d) are added to the token embedding (Vaswani 2017, 3.5)."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    arrangement: Literal["interleaved", "halves"] = Field(
        "interleaved",
        description="Channel order: alternating sine and cosine as in the paper, or all sines "
        "before all cosines (Marian).",
    )

    def find_violations(
        self, model: ModelShape, rotated: int, *, is_latent: bool
    ) -> Iterator[Violation]:
        """Yield an odd width."""
        if model.hidden_size % 2:
            yield Violation(
                "hidden_size",
                f"{model.hidden_size} is odd, but sinusoids come in pairs. Use "
                f"{model.hidden_size + 1}.",
            )


class AlibiConfig(_BasePositionConfig):
    """−slope · distance is added to the score; the slopes are a fixed geometric series over
    heads (Press 2021).
    """

    kind: Literal["alibi"] = "alibi"
    has_score_table: ClassVar[bool] = True
    factor: float = Field(1.0, gt=0, description="Scale of the bias (Falcon: 1 / sqrt(head_dim)).")


class RelativeBiasConfig(_BasePositionConfig):
    """A trained number for each head and bucket of distances is added to the score; one table
    per stack (T5).
    """

    kind: Literal["relative_bias"] = "relative_bias"
    has_score_table: ClassVar[bool] = True
    has_trained_scores: ClassVar[bool] = True
    buckets: int = Field(32, ge=2, description="Number of distance buckets.")
    max_distance: int = Field(
        128, ge=1, description="Distance from which all distances share the last bucket."
    )

    def iter_stack_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the table of biases by bucket and head."""
        yield ParameterTensor(
            "relative_bias.weight", (self.buckets, model.num_attention_heads), "positions"
        )


class TransformerXlPositionConfig(_BasePositionConfig):
    """(q + u)·k + (q + v)·W r with sinusoids r of the distance (Dai 2019; Gopher, Chinchilla,
    XLNet).
    """

    kind: Literal["transformer_xl"] = "transformer_xl"
    has_trained_scores: ClassVar[bool] = True
    biases: bool = Field(
        True,
        description="Add the biases u and v; Gopher's published parameter counts exclude them.",
    )
    segments: int = Field(
        0,
        ge=0,
        description="Number of XLNet's segment encodings per layer (2, with a bias). 0: none.",
    )

    def iter_attention_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projection of distances, and the vectors u and v instead of queries (Dai
        2019, 3.3).
        """
        heads = (model.num_attention_heads, model.head_dim)
        projection = (heads[0] * heads[1], model.hidden_size)
        yield ParameterTensor(
            "attention.position_proj.weight", projection, "attention", input="distance", cut_steps=1
        )
        if self.biases:
            yield ParameterTensor("attention.content_bias", heads, "positions")
            yield ParameterTensor("attention.position_bias", heads, "positions")
        if self.segments:
            yield ParameterTensor("attention.segment_bias", heads, "positions")
            yield ParameterTensor("attention.segment_embed", (self.segments, *heads), "positions")

    def count_query_products(self, distance_pairs: int, length: int) -> int:
        """Return the products of one head with distances and with segments."""
        return distance_pairs + self.segments * length

    def iter_saved_tensors(
        self, scores: ScoreShape, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield a key for each distance (2T - 1 in a sequence), the queries for them, and their
        scores.
        """
        distances, channels = (
            scores.keys + min(shape.length, scores.keys) - 1,
            scores.heads * scores.key_channels,
        )
        yield SavedTensor(
            "keys of distances", int(distances * channels * shape.value_bytes), "product"
        )
        yield SavedTensor(
            "queries of distances", shape.compute_sharded_bytes(channels), "pointwise"
        )
        yield SavedTensor(
            "scores by distance",
            shape.compute_score_bytes(scores.heads, keys=distances),
            "pointwise",
        )
        # int64 indices of all heads; XLNet's second stream has its own in every row.
        rows = shape.sequences if scores.keys < shape.length else 1
        yield SavedTensor("which distance", 8 * rows * shape.length * scores.keys, "pointwise")
        if self.segments:
            yield SavedTensor(
                "queries of segments", shape.compute_sharded_bytes(channels), "pointwise"
            )


class NoPositionConfig(_BasePositionConfig):
    """No position encoding; the causal mask is the only position signal."""

    kind: Literal["none"] = "none"


PositionConfig = Annotated[
    RopeConfig
    | LearnedPositionConfig
    | SinusoidalPositionConfig
    | AlibiConfig
    | RelativeBiasConfig
    | TransformerXlPositionConfig
    | NoPositionConfig,
    Field(discriminator="kind"),
]
