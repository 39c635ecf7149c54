"""Configuration of what tokens are looked up in (`model.embedding`): the token embedding, and
further tables of tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.section import Section
from llmsys.errors import Violation


class EmbeddingConfig(Section):
    """The token embedding. An encoder-decoder shares it unless `source_vocab_size` is set."""

    scale: float | Literal["sqrt_hidden_size"] = Field(
        1.0,
        description="Scale of the token embedding; sqrt_hidden_size as in Vaswani 2017 and Gemma.",
    )
    norm: bool = Field(
        False, description="Normalize the sum of all embeddings (BERT, BLOOM, BART)."
    )
    token_types: int = Field(0, ge=0, description="Number of learned segment embeddings (BERT: 2).")
    source_vocab_size: int | None = Field(
        None,
        ge=2,
        description="Rows of a separate source embedding in an encoder-decoder. null: share the "
        "target's.",
    )
    initializer_range: float | None = Field(
        None,
        gt=0,
        description="Standard deviation of the initial token embedding. null: "
        "model.initializer_range.",
    )
    value_layers: tuple[int, ...] = Field(
        (),
        description="Layers whose values are added a vector of each token, from a table of their "
        "own, times a trained number (value embeddings of modded-nanogpt).",
    )
    bigram_rows: int | None = Field(
        None,
        ge=2,
        le=10**12,
        description="Rows of a table that begins at zero and is added to the token embedding, "
        "looked up by a hash of a token and the one before it in its document. null: none.",
    )

    def iter_value_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters of a layer of `value_layers`.

        Args:
            model: widths of the model.
        """
        width = model.num_key_value_heads * model.head_dim
        yield ParameterTensor(
            "attention.value_embedding.weight", (model.vocab_size, width), "attention"
        )
        yield ParameterTensor("attention.value_scale", (1,), "attention")

    def find_violations(
        self, model: dict[str, Any], other_layers: Sequence[int]
    ) -> Iterator[Violation]:
        """Yield what tables of tokens cannot be combined with.

        Args:
            model: fields of the model.
            other_layers: its layers of linear attention, or of none, which have no values of heads.
        """
        parametrization = model["parametrization"].kind
        refused = {
            "family": None if model["family"] == "decoder" else model["family"],
            "patches": model["patches"],
            "rnn": model["rnn"],
            "multi_token_prediction": model["multi_token_prediction"],
            "parametrization.kind": None if parametrization == "standard" else parametrization,
        }
        if self.bigram_rows is not None:
            yield from self._find_refused("bigram_rows", refused)
        if not self.value_layers:
            return
        attention, position = model["attention"].kind, model["position"].kind
        refused |= {
            "attention.kind": None if attention == "multi_head" else attention,
            "position.kind": position if position == "transformer_xl" else None,
            "recurrence": model["recurrence"],
        }
        yield from self._find_refused("value_layers", refused)
        last = model["num_hidden_layers"] - 1
        for layer in self.value_layers:
            if not 0 <= layer <= last:
                yield Violation(
                    "embedding.value_layers",
                    f"there is no layer {layer}. Use numbers from 0 to {last}.",
                )
            elif layer in other_layers:
                yield Violation(
                    "embedding.value_layers",
                    f"layer {layer} has linear attention or none. Use layers of full or sliding "
                    "attention.",
                )
        if len(set(self.value_layers)) < len(self.value_layers):
            yield Violation("embedding.value_layers", "a layer is named twice. Name it once.")

    def _find_refused(self, key: str, refused: Mapping[str, Any]) -> Iterator[Violation]:
        for other in (one for one, value in refused.items() if value is not None):
            value = getattr(refused[other], "kind", refused[other])
            shown = f"model.{other}={value}" if isinstance(value, str) else f"model.{other}"
            yield Violation(
                f"embedding.{key}",
                f"{shown} has no such table. Leave embedding.{key} out, or use a decoder of "
                "standard blocks.",
            )
