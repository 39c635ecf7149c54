"""A protocol of the model widths that config kinds need to list their tensors.

ModelConfig satisfies it. Kinds are types of its fields, so they cannot import it.
"""

from typing import Protocol

from llmsys.config.norm import NormConfig


class ModelShape(Protocol):
    """Widths of a model, named as the fields of ModelConfig."""

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
    def norm(self) -> NormConfig:
        """Kind of normalisation."""
