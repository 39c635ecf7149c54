"""Attention and feed-forward of the user's own code: `model.attention.kind=python` and
`model.feed_forward.kind=python`.

The sections name a class that extends `llmsys.model.python_block.PythonMixer` or
`PythonFeedForward`. Nothing here runs it: its parameters, FLOPs and saved bytes are measured where
they are asked for, see llmsys/estimate/python_blocks.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from llmsys.config.attention import BaseAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    ActivationShape,
    ParameterTensor,
    SavedTensor,
    ScoreShape,
)
from llmsys.config.python_code import PythonCode
from llmsys.errors import Violation

# Positions that a context can describe to a class: added to the embedding, or a rotation.
POSITIONS = ("rope", "learned", "sinusoidal", "none")


class PythonAttentionConfig(PythonCode, BaseAttentionConfig):
    """An attention, or another mixer of positions, of your own: a class that extends
    `llmsys.model.python_block.PythonMixer`.
    """

    kind: Literal["python"] = "python"
    has_own_mask: ClassVar[bool] = True
    recomputes_prefix: ClassVar[bool] = True

    __hash__ = PythonCode.__hash__

    @property
    def cross_attention(self) -> MultiHeadAttentionConfig:
        """Configuration of a cross-attention; no family with one has this attention."""
        return MultiHeadAttentionConfig()

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield nothing: the estimate measures the parameters of the built module."""
        yield from ()

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the heads of the config; the class may not have them.

        Args:
            model: widths of the model.
            keys: keys of each row.
            is_causal: a query sees the keys up to its own position only.
        """
        return self.cross_attention.build_score_shape(model, keys, is_causal=is_causal)

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return 0.

        Args:
            model: widths of the model.
        """
        return 0

    def iter_saved_tensors(
        self,
        model: ModelShape,
        scores: ScoreShape,
        shape: ActivationShape,
        *,
        is_rotated: bool,
        are_queries_saved: bool,
        are_keys_saved: bool,
    ) -> Iterator[SavedTensor]:
        """Yield nothing: the estimate measures what the built module saves."""
        yield from ()

    def find_violations(
        self, model: ModelShape, *, family: str, position: str, window: int | None
    ) -> Iterator[Violation]:
        """Yield the family and the position that no class gets.

        Args:
            model: widths of the model.
            family: `model.family`.
            position: kind of `model.position`.
            window: `model.sliding_window`; a class reads it from its shape.
        """
        if family == "encoder_decoder":
            yield Violation(
                "attention.kind",
                "python has no cross-attention, so family=encoder_decoder cannot use it. Use "
                "multi_head, or family=decoder.",
            )
        if position not in POSITIONS:
            yield Violation(
                "position.kind",
                f"{position} changes scores, which attention.kind=python computes itself. Use "
                f"{', '.join(POSITIONS)}.",
            )


class PythonFeedForwardConfig(PythonCode):
    """A feed-forward of your own: a class that extends
    `llmsys.model.python_block.PythonFeedForward`.
    """

    kind: Literal["python"] = "python"
    # the elementwise work that the estimate of time takes for it: that of a gated layer
    projections: ClassVar[tuple[str, ...]] = ("gate", "up", "down")

    __hash__ = PythonCode.__hash__


def find_python_violations(model: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield choices that are not proven with a block of the user's own, with keys below `model`.

    Args:
        model: fields of a ModelConfig.
    """
    own = [name for name in ("attention", "feed_forward") if model[name].kind == "python"]
    given = {
        "rnn": model["rnn"] is not None,
        "recurrence": model["recurrence"] is not None,
        "multi_token_prediction": model["multi_token_prediction"] is not None,
        "parametrization.kind": model["parametrization"].kind != "standard",
        "residual.kind": model["residual"].is_reversible,
        "encoder": model["family"] == "encoder_decoder" and "attention" not in own,
    }
    for name in own[:1]:
        for key in (key for key, is_given in given.items() if is_given):
            yield Violation(
                key,
                f"{name}.kind=python is not proven with it. Leave it out, or use a kind of {name} "
                "that is built in.",
            )
