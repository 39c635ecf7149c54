"""Protocols of the model and of its norm, which config kinds need to list their tensors.

ModelConfig satisfies them. Kinds are types of its fields, so they cannot import it.
"""

from collections.abc import Iterator
from typing import Protocol

from llmsys.config.module_tensors import ActivationShape, ParameterTensor


class NormShape(Protocol):
    """The part of `model.norm` that config kinds read, see norm.py."""

    def iter_parameters(self, name: str, channels: int) -> Iterator[ParameterTensor]:
        """Yield the parameters of a norm.

        Args:
            name: name of its module, the prefix of theirs.
            channels: width that it normalizes.
        """
        ...

    def compute_row_statistics_bytes(self, shape: ActivationShape) -> int:
        """Return the bytes of the statistics that are saved for each row.

        Args:
            shape: the micro-batch of one rank.
        """
        ...

    def is_unscaled_input_saved(self, shape: ActivationShape) -> bool:
        """Return whether the product before the weight is saved."""
        ...


class ModelShape(Protocol):
    """Widths of a model, named as the fields of ModelConfig, which satisfies it and which kinds
    cannot import.
    """

    @property
    def family(self) -> str:
        """Kind of the model, or of one of its stacks."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers of the stack."""

    @property
    def vocab_size(self) -> int:
        """Rows of the token embedding."""

    @property
    def hidden_size(self) -> int:
        """Channels of the residual stream."""

    @property
    def num_attention_heads(self) -> int:
        """Query heads."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys and values."""

    @property
    def head_dim(self) -> int:
        """Channels of one head."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence in positions."""

    @property
    def tie_word_embeddings(self) -> bool:
        """The head uses the embedding matrix."""

    @property
    def norm(self) -> NormShape:
        """Kind of normalisation."""
