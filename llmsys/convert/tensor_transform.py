"""How one tensor of a Hugging Face file lies beside ours: forms that are turned around without losing a bit.

A form takes the tensors of one rule and gives those of the other side; `to_hugging_face` undoes `from_hugging_face`
exactly. They work on the meta device too, which is how the shapes that a file must have are found before anything is
read.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig

# E experts, D width, I width of an expert


class TensorTransform(Protocol):
    """One way of laying out the same numbers."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return our tensors, in the order of the rule."""
        ...

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Their tensors, in the order of the rule."""
        ...


@dataclass(frozen=True)
class Identity:
    """Equal shapes."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """As they are."""
        return theirs

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """As they are."""
        return ours


@dataclass(frozen=True)
class Transpose:
    """Matrices (in, out) beside (out, in); vectors stay."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return rows become columns."""
        return [_transpose_matrix(one) for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Columns become rows."""
        return [_transpose_matrix(one) for one in ours]


@dataclass(frozen=True)
class SingleRow:
    """A matrix with one row beside a vector (Marian's and BART's final_logits_bias)."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return the row."""
        return [one.squeeze(0) for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return a matrix of it."""
        return [one.unsqueeze(0) for one in ours]


@dataclass(frozen=True)
class FusedQkv:
    """One map for all three, its rows all queries, then all keys, then all values (GPT-2's transposed, DBRX)."""

    transposed: bool = False

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Three maps."""
        fused = _transpose_matrix(theirs[0]) if self.transposed else theirs[0]
        return list(fused.split([heads * model.head_dim for heads in _count_heads(model)]))

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one map."""
        fused = torch.cat(ours)
        return [_transpose_matrix(fused) if self.transposed else fused]


@dataclass(frozen=True)
class FusedQkvByHead:
    """One map for all three, in turn for each key-value head: its queries, its key, its value.

    That is GPT-NeoX and BLOOM, where every head has its own key, and Falcon with any number of them.
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Three maps."""
        queries, keys, _ = _count_heads(model)
        rest = theirs[0].shape[1:]
        grouped = theirs[0].reshape(keys, queries // keys + 2, model.head_dim, *rest)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return [part.reshape(-1, *rest) for part in parts]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one map."""
        keys, rest = model.num_key_value_heads, ours[0].shape[1:]
        grouped = [one.reshape(keys, -1, model.head_dim, *rest) for one in ours]
        return [torch.cat(grouped, dim=1).reshape(-1, *rest)]


@dataclass(frozen=True)
class InterleavedGateUp:
    """gate and up of all experts in one tensor, their last channels in turn (gpt-oss)."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Gate and up."""
        return [theirs[0][..., 0::2], theirs[0][..., 1::2]]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Channel by channel."""
        return [torch.stack(ours, dim=-1).flatten(-2)]


@dataclass(frozen=True)
class StackedExperts:
    """The experts' matrices under each other, (E·I, D) (DBRX); ours are (E, D, I), or (E, I, D) for `down`."""

    down: bool = False

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Stacked."""
        experts = 0 if model.moe is None else model.moe.num_experts
        stacked = theirs[0].reshape(experts, -1, theirs[0].shape[-1])
        return [stacked if self.down else stacked.transpose(1, 2)]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Under each other."""
        return [(ours[0] if self.down else ours[0].transpose(1, 2)).flatten(0, 1)]


def _transpose_matrix(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.ndim == 2 else tensor


def _count_heads(model: ModelConfig) -> tuple[int, int, int]:
    return model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads
