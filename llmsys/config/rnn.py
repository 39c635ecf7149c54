"""Configuration of recurrent layers (`model.rnn`): the sequence-to-sequence models that the Transformer replaced."""

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import ParameterTensor, iter_linear_parameters
from llmsys.config.section import Section, Violation


class _BaseRnnConfig(Section):
    """Recurrent layers in both stacks, and attention over the source after the decoder's last layer."""

    num_gates: ClassVar[int]  # products of one channel, by input and by state
    num_states: ClassVar[int] = 1  # vectors that a layer hands to the next position

    score: Literal["bilinear", "additive"] = Field(
        "bilinear", description="Score of attention: q·W k (Luong 2015), or v·tanh(W q + W' k) (Bahdanau 2014)."
    )
    input_feeding: bool = Field(
        True, description="Feed the attended state into the next position (Luong 2015, 3.3); positions then run singly."
    )

    def find_violations(self, model: Any) -> Iterator[Violation]:
        """Yield what recurrent layers cannot be combined with, with keys below `model`."""
        kind: str = type(self).model_fields["kind"].default
        wanted = {"family": "encoder_decoder", "num_attention_heads": 1, "position.kind": "none"}
        for key, value in wanted.items():
            if (found := attrgetter(key)(model)) != value:
                yield Violation(key, f"rnn.kind={kind} needs {value}, not {found}. Use {value}, or rnn=null.")
        if model.hidden_size % 2:
            half = f"{model.hidden_size} is odd, but each direction of rnn.kind={kind} has half of the channels"
            yield Violation("hidden_size", f"{half}. Use {model.hidden_size + 1}.")
        unused = {key: getattr(model, key) != type(model).model_fields[key].default for key in _OF_BLOCKS}
        unused |= {f"dropout.{key}": getattr(model.dropout, key) > 0 for key in ("attention", "activation")}
        unused["head_dim"] = model.head_dim != model.hidden_size // model.num_attention_heads
        for key in ("intermediate_size", "num_attention_heads"):
            unused[f"encoder.{key}"] = getattr(model.encoder, key, None) is not None
        for key in (key for key, is_set in unused.items() if is_set):
            yield Violation(key, f"it belongs to blocks, and rnn.kind={kind} has none. Leave it out, or use rnn=null.")


_OF_BLOCKS = ("intermediate_size", "sliding_window", "layer_types", "norm", "residual", "attention", "feed_forward")
_OF_BLOCKS += ("moe", "recurrence")


class ElmanConfig(_BaseRnnConfig):
    """h = tanh(W x + U h) (Elman 1990; torch.nn.RNN)."""

    kind: Literal["elman"] = "elman"
    num_gates: ClassVar[int] = 1


class LstmConfig(_BaseRnnConfig):
    """Long short-term memory (Hochreiter 1997; torch.nn.LSTM)."""

    kind: Literal["lstm"] = "lstm"
    num_gates: ClassVar[int] = 4
    num_states: ClassVar[int] = 2


class GruConfig(_BaseRnnConfig):
    """Gated recurrent unit (Cho 2014; torch.nn.GRU)."""

    kind: Literal["gru"] = "gru"
    num_gates: ClassVar[int] = 3


RnnConfig = Annotated[ElmanConfig | LstmConfig | GruConfig, Field(discriminator="kind")]
