"""Types of a family's name mapping: pairs of our tensors and theirs, and other tensors that a file
may hold.

Names contain `{i}` for the block, `{n}` for the block number of a prediction module, and `{e}` for
the expert where theirs are separate and ours are stacked.

A transform converts between the layouts of our tensors and Hugging Face's without rounding: it
takes the tensors of one mapping and returns those of the other side. Transforms also run on the
meta device, which gives the shapes that a file must have before anything is read.

Invariants:
- `to_hugging_face` is the exact inverse of `from_hugging_face`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig

# E experts, D width, I width of an expert


class TensorTransform(Protocol):
    """One way to lay out the same numbers."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return our tensors, in the order of the mapping.

        Args:
            theirs: tensors of Hugging Face, in the order of the mapping.
            model: the architecture, for head counts and widths.
        """
        ...

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return their tensors, in the order of the mapping.

        Args:
            ours: tensors of llmsys, in the order of the mapping.
            model: the architecture, for head counts and widths.
        """
        ...


@dataclass(frozen=True)
class Identity:
    """Equal layouts."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return them unchanged."""
        return theirs

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return them unchanged."""
        return ours


@dataclass(frozen=True)
class Transpose:
    """Matrices (in, out) in theirs, (out, in) in ours; vectors are equal."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return each matrix transposed."""
        return [_transpose_matrix(one) for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return each matrix transposed."""
        return [_transpose_matrix(one) for one in ours]


@dataclass(frozen=True)
class SingleRow:
    """`dims` more leading dims of size 1 in theirs (final_logits_bias of Marian and BART,
    positions of ViT).
    """

    dims: int = 1

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return them without these dims."""
        return [one[(0,) * self.dims] for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return them with these dims."""
        return [one[(None,) * self.dims] for one in ours]


@dataclass(frozen=True)
class ConvolutionWeight:
    """The map of a patch as a convolution in theirs, (D, C, height, width), as a matrix in ours
    (ViT).
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return matrices."""
        return [one.flatten(1) for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return convolution weights."""
        assert model.patches is not None
        size = model.patches.patch_size
        return [one.unflatten(1, (model.patches.num_channels, size, size)) for one in ours]


@dataclass(frozen=True)
class FusedQkv:
    """One projection for queries, keys and values: all query rows, then all key rows, then all
    value rows.

    DBRX; GPT-2 has it transposed.
    """

    transposed: bool = False

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return three projections."""
        fused = _transpose_matrix(theirs[0]) if self.transposed else theirs[0]
        return list(fused.split([heads * model.head_dim for heads in _count_heads(model)]))

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one projection."""
        fused = torch.cat(ours)
        return [_transpose_matrix(fused) if self.transposed else fused]


@dataclass(frozen=True)
class FusedRows:
    """One projection for two of equal size: all rows of the first, then those of the second (gate
    and up of GLM-4).
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return two projections."""
        return list(theirs[0].chunk(2))

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one projection."""
        return [torch.cat(ours)]


@dataclass(frozen=True)
class FusedQkvByHead:
    """One projection, interleaved by key-value head: its queries, its key, its value.

    GPT-NeoX and BLOOM, where every head has its own key, and Falcon with any number of key-value
    heads.
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return three projections."""
        queries, keys, _ = _count_heads(model)
        rest = theirs[0].shape[1:]
        grouped = theirs[0].reshape(keys, queries // keys + 2, model.head_dim, *rest)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return [part.reshape(-1, *rest) for part in parts]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one projection."""
        keys, rest = model.num_key_value_heads, ours[0].shape[1:]
        grouped = [one.reshape(keys, -1, model.head_dim, *rest) for one in ours]
        return [torch.cat(grouped, dim=1).reshape(-1, *rest)]


@dataclass(frozen=True)
class InterleavedGateUp:
    """Gate and up of all experts in one tensor, interleaved in the last axis (gpt-oss)."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return gate and up."""
        return [theirs[0][..., 0::2], theirs[0][..., 1::2]]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return gate and up, interleaved."""
        return [torch.stack(ours, dim=-1).flatten(-2)]


@dataclass(frozen=True)
class StackedExperts:
    """The experts' matrices concatenated, (E·I, D) (DBRX); ours are (E, D, I), or (E, I, D) for
    `down`.
    """

    down: bool = False

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return the experts stacked."""
        experts = 0 if model.moe is None else model.moe.num_experts
        stacked = theirs[0].reshape(experts, -1, theirs[0].shape[-1])
        return [stacked if self.down else stacked.transpose(1, 2)]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return the experts concatenated."""
        return [(ours[0] if self.down else ours[0].transpose(1, 2)).flatten(0, 1)]


@dataclass(frozen=True)
class TransposedExperts:
    """Matrices (out, in) of all experts in one tensor of theirs, (in, out) in each of ours; one
    after another where ours are several (gate and up of Granite).
    """

    parts: int = 1

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return the matrices of each part."""
        return list(theirs[0].transpose(1, 2).chunk(self.parts, dim=2))

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one tensor."""
        return [torch.cat(ours, dim=2).transpose(1, 2)]


def _transpose_matrix(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.ndim == 2 else tensor


def _count_heads(model: ModelConfig) -> tuple[int, int, int]:
    return model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads


SAME = Identity()


@dataclass(frozen=True)
class NameMapping:
    """A pair of tensor lists, `ours` and `theirs`, that hold the same numbers, converted by
    `form`.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: TensorTransform = SAME


@dataclass(frozen=True)
class FamilyMapping:
    """The name mapping of one family.

    Attributes:
        rules: used where our model has the tensors; the config decides, so a mapping may name more
            than a model has.
        prefix: left out of every name in files of the bare model.
        copies: their name → the name whose values it repeats when weights are tied.
        ignored: patterns of tensors in old files that nothing reads, because they can be computed.
        aliases: old endings of names → current ones.
        outer: beginnings of names in files of a model with other parts too → those of its language
            model alone.
    """

    rules: tuple[NameMapping, ...]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)


def map_modules(names: Mapping[str, str], form: TensorTransform = SAME) -> tuple[NameMapping, ...]:
    """Return mappings of the weight and the bias of each module, ours → theirs."""
    return tuple(
        NameMapping((f"{ours}.{kind}",), (f"{theirs}.{kind}",), form)
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    )


def map_fused_module(
    ours: tuple[str, ...], theirs: str, form: TensorTransform
) -> tuple[NameMapping, ...]:
    """Return mappings of the weight and the bias of one module of theirs that holds several of
    ours.
    """
    return tuple(
        NameMapping(tuple(f"{one}.{kind}" for one in ours), (f"{theirs}.{kind}",), form)
        for kind in ("weight", "bias")
    )


def map_tensors(names: Mapping[str, str], form: TensorTransform = SAME) -> tuple[NameMapping, ...]:
    """Return mappings of single tensors.

    Args:
        names: our name → theirs.
        form: how each tensor changes.
    """
    return tuple(NameMapping((ours,), (theirs,), form) for ours, theirs in names.items())
