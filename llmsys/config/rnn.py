"""Configuration of recurrent layers (`model.rnn`): the language models, classifiers and
sequence-to-sequence models that the Transformer replaced.

A kind of cell has its number of gates and states, and lists its parameters and saved tensors.
"""

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    ParameterTensor,
    SavedTensor,
    iter_linear_parameters,
)
from llmsys.config.section import Section
from llmsys.errors import Violation

# Fields of a model that belong to blocks.
_BLOCK_FIELDS = (
    *(
        "intermediate_size",
        "sliding_window",
        "layer_types",
        "feed_forward_layers",
        "multipliers",
        "norm",
        "residual",
        "attention",
        "feed_forward",
    ),
    *("moe", "recurrence", "linear_attention", "multi_token_prediction", "patches"),
)


class _BaseRnnConfig(Section):
    """Recurrent layers in all stacks, and attention over the source after the decoder's last
    layer.

    An encoder reads in both directions, a decoder forwards. A decoder alone is a language model.
    """

    num_gates: ClassVar[int]  # products of one channel, by input and by state
    num_states: ClassVar[int] = 1  # vectors that a layer hands to the next position
    num_saved: ClassVar[int]  # values that a channel saves at a position, its states among them
    num_kernels: ClassVar[int]  # kernels of one layer at one position, forward

    score: Literal["bilinear", "additive", "none"] = Field(
        "bilinear",
        description="Score of attention over a source: q·W k (Luong 2015), or v·tanh(W q + W' k) "
        "(Bahdanau 2014). none: no attention (Sutskever 2014).",
    )
    input_feeding: bool = Field(
        True,
        description="Feed the attended state into the next position (Luong 2015, 3.3); positions "
        "then run singly.",
    )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters of one stack, whose layers are one block.

        Args:
            model: widths of the stack, an encoder if its family is `encoder`.
        """
        width, layers = model.hidden_size, range(model.num_hidden_layers)
        if model.family == "encoder":
            for side in ("forward_cells", "backward_cells"):
                for layer in layers:
                    yield from self._iter_cell_parameters(
                        f"blocks.0.{side}.{layer}", width, width // 2
                    )
            return
        for layer in layers:
            yield from self._iter_cell_parameters(f"blocks.0.cells.{layer}", width, width)
        if model.family != "encoder_decoder":
            return
        if self.input_feeding:
            name = "blocks.0.feed_proj"
            yield from iter_linear_parameters(
                name, self.num_gates * width, width, False, "recurrent"
            )
        states = len(layers) * self.num_states * width
        yield from iter_linear_parameters(
            "blocks.0.bridge", states, width, True, "recurrent", "sequence"
        )
        if self.score == "none":
            return
        name = "blocks.0.attention"
        yield from iter_linear_parameters(
            f"{name}.k_proj", width, width, False, "attention", "source"
        )
        if self.score == "additive":
            yield from iter_linear_parameters(f"{name}.q_proj", width, width, True, "attention")
            # Multiplied once for each pair of positions: counted with the scores.
            yield ParameterTensor(f"{name}.score_proj.weight", (1, width), "attention")
        yield from iter_linear_parameters(
            f"{name}.output_proj", width, 2 * width, False, "attention"
        )

    def _iter_cell_parameters(
        self, name: str, inputs: int, width: int
    ) -> Iterator[ParameterTensor]:
        gates = self.num_gates * width
        yield from iter_linear_parameters(f"{name}.input_proj", gates, inputs, True, "recurrent")
        yield from iter_linear_parameters(f"{name}.state_proj", gates, width, True, "recurrent")

    def count_kernels(
        self, model: ModelShape, encoder: ModelShape, length: int, source: int
    ) -> int:
        """Count the kernels of one forward pass, which run one after another.

        Args:
            model: widths of the model.
            encoder: widths of the encoder of an encoder-decoder.
            length: positions of a row, or of a target.
            source: positions of a source.

        Returns:
            Kernels of the cells at every position, and of attention.
        """
        directions = 2 if model.family == "encoder" else 1
        cells = directions * model.num_hidden_layers * length
        if model.family == "encoder_decoder":
            cells += 2 * encoder.num_hidden_layers * source
        # scores, mask, softmax, weighted sum, join, product and tanh
        attention = 0 if self.score == "none" else 8
        return self.num_kernels * cells + attention * (length if self.input_feeding else 1)

    def iter_saved_tensors(
        self, model: ModelShape, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield the tensors that one stack saves.

        Args:
            model: widths of the stack.
            shape: the micro-batch, whose length is that of the stack.
        """
        hidden = shape.compute_residual_bytes(model.hidden_size)
        is_encoder, state = (
            model.family == "encoder",
            shape.sequences * model.hidden_size * shape.value_bytes,
        )
        # The decoder's first states are listed below. The last output is stacked; it is saved
        # itself too where attention reads it alone, or where tanh made it.
        saves_last = self.num_saved == self.num_states or (self.input_feeding and not is_encoder)
        elsewhere = ((0 if is_encoder else self.num_states) - saves_last) * state
        yield SavedTensor("block input", hidden, "input")
        for layer in range(model.num_hidden_layers):
            yield SavedTensor("gates and states", self.num_saved * hidden - elsewhere, "pointwise")
            if not is_encoder and not self.input_feeding:
                yield SavedTensor("outputs of a layer", hidden, "pointwise")
            if is_encoder:
                yield SavedTensor("reversed input", hidden, "pointwise")
                yield SavedTensor("states of the reversed input", hidden // 2, "pointwise")
                yield SavedTensor("both directions", hidden if layer else 0, "pointwise")
        if not is_encoder:
            yield SavedTensor(
                "first states", model.num_hidden_layers * self.num_states * state, "pointwise"
            )
        if not is_encoder and self.score != "none":
            yield from self._iter_attention_tensors(model, shape)

    def _iter_attention_tensors(
        self, model: ModelShape, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        hidden, sources = (
            shape.compute_residual_bytes(model.hidden_size),
            shape.source / shape.length,
        )
        yield SavedTensor("encoder output", int(hidden * sources), "pointwise")
        is_additive = self.score == "additive"
        yield SavedTensor("keys", int(hidden * sources), "product", is_saved=not is_additive)
        if is_additive:
            yield SavedTensor("scores, tanh", hidden * shape.source, "pointwise")
        yield SavedTensor(
            "scores, softmax",
            shape.compute_score_bytes(1, FP32_BYTES, keys=shape.source),
            "pointwise",
        )
        if shape.value_bytes != FP32_BYTES:
            yield SavedTensor(
                "scores, weights", shape.compute_score_bytes(1, keys=shape.source), "pointwise"
            )
        yield SavedTensor("context and state", 2 * hidden, "pointwise")
        yield SavedTensor("attended state", hidden, "pointwise")

    def find_violations(self, model: Any) -> Iterator[Violation]:
        """Yield what recurrent layers cannot be combined with, with keys below `model`."""
        kind: str = type(self).model_fields["kind"].default
        for key, value in {"num_attention_heads": 1, "position.kind": "none"}.items():
            if (found := attrgetter(key)(model)) != value:
                yield Violation(
                    key, f"rnn.kind={kind} needs {value}, not {found}. Use {value}, or rnn=null."
                )
        if model.family != "encoder_decoder" and self.score != "none":
            yield Violation(
                "rnn.score",
                f"{self.score} attends to a source, and family={model.family} has none. Use none "
                "with rnn.input_feeding=false, or family=encoder_decoder.",
            )
        elif self.score == "none" and self.input_feeding:
            yield Violation(
                "rnn.input_feeding",
                "true feeds the attended state, and rnn.score=none attends to nothing. Use false, "
                "or rnn.score=bilinear.",
            )
        if model.hidden_size % 2 and model.family != "decoder":
            yield Violation(
                "hidden_size",
                f"{model.hidden_size} is odd, but each direction of rnn.kind={kind} has half of "
                "the channels"
                f". Use {model.hidden_size + 1}.",
            )
        unused = {
            key: getattr(model, key) != type(model).model_fields[key].default
            for key in _BLOCK_FIELDS
        }
        unused |= {
            f"dropout.{key}": getattr(model.dropout, key) > 0 for key in ("attention", "activation")
        }
        unused["head_dim"] = model.head_dim != model.hidden_size // model.num_attention_heads
        for key in ("intermediate_size", "num_attention_heads"):
            unused[f"encoder.{key}"] = getattr(model.encoder, key, None) is not None
        for key in (key for key, is_set in unused.items() if is_set):
            yield Violation(
                key,
                f"it belongs to blocks, and rnn.kind={kind} has none. Leave it out, or use "
                "rnn=null.",
            )


class ElmanConfig(_BaseRnnConfig):
    """h = tanh(W x + U h) (Elman 1990; torch.nn.RNN)."""

    kind: Literal["elman"] = "elman"
    num_gates: ClassVar[int] = 1
    num_saved: ClassVar[int] = 1
    num_kernels: ClassVar[int] = 3


class LstmConfig(_BaseRnnConfig):
    """Long short-term memory (Hochreiter 1997; torch.nn.LSTM)."""

    kind: Literal["lstm"] = "lstm"
    num_gates: ClassVar[int] = 4
    num_states: ClassVar[int] = 2
    num_saved: ClassVar[int] = 7  # four gates, both states, and tanh of the cell's
    num_kernels: ClassVar[int] = 11


class GruConfig(_BaseRnnConfig):
    """Gated recurrent unit (Cho 2014; torch.nn.GRU)."""

    kind: Literal["gru"] = "gru"
    num_gates: ClassVar[int] = 3
    # three gates, the products of the state, its change, and the state
    num_saved: ClassVar[int] = 8
    num_kernels: ClassVar[int] = 10


RnnConfig = Annotated[ElmanConfig | LstmConfig | GruConfig, Field(discriminator="kind")]
