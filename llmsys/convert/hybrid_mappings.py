"""Name mappings of hybrids, whose layers mix positions in several ways: Qwen3-Next.

Source: the parameter names of the published checkpoints, as transformers reads and writes them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from llmsys.config.linear_attention import GatedDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.convert.decoder_mappings import QWEN_MOE, TABLES, TIED
from llmsys.convert.name_mapping import (
    FamilyMapping,
    NameMapping,
    map_fused_module,
    map_modules,
    map_tensors,
)

# Modules for multi-token prediction, which transformers' class does not build.
PREDICTION = (r"^mtp\.",)


@dataclass(frozen=True)
class FusedByKeyHead:
    """Projections of linear attention in one tensor of theirs, interleaved by key head.

    Four parts are its query, its key, the values that share it and their gates; two are the shares
    and the decays of these values.
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return the projections."""
        linear = _get_linear_attention(model)
        rest = theirs[0].shape[1:]
        share = linear.num_value_heads // linear.num_key_heads
        keys, values = linear.key_head_dim, share * linear.value_head_dim
        grouped = theirs[0].reshape(linear.num_key_heads, -1, *rest)
        parts = [share, share] if grouped.shape[1] == 2 * share else [keys, keys, values, values]
        return [part.reshape(-1, *rest) for part in grouped.split(parts, dim=1)]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one tensor."""
        linear = _get_linear_attention(model)
        rest = ours[0].shape[1:]
        grouped = [one.reshape(linear.num_key_heads, -1, *rest) for one in ours]
        return [torch.cat(grouped, dim=1).reshape(-1, *rest)]


@dataclass(frozen=True)
class QueriesWithGates:
    """Queries and the gates of their outputs in one projection of theirs, interleaved by head."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return queries and gates."""
        rest = theirs[0].shape[1:]
        grouped = theirs[0].reshape(model.num_attention_heads, 2, model.head_dim, *rest)
        return [grouped[:, part].reshape(-1, *rest) for part in range(2)]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one projection."""
        rest = ours[0].shape[1:]
        grouped = [one.reshape(model.num_attention_heads, model.head_dim, *rest) for one in ours]
        return [torch.stack(grouped, dim=1).reshape(-1, *rest)]


@dataclass(frozen=True)
class ChannelConvolution:
    """Weights of a convolution channel by channel, (D, 1, W) in theirs and (D, W) in ours."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return matrices."""
        return [one[:, 0] for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return convolution weights."""
        return [one[:, None] for one in ours]


def _get_linear_attention(model: ModelConfig) -> GatedDeltaConfig:
    assert model.linear_attention is not None
    return model.linear_attention


def _map_linear_attention(layer: int) -> tuple[NameMapping, ...]:
    ours, theirs = f"blocks.{layer}.attention", f"model.layers.{layer}.linear_attn"
    fused = {
        f"{theirs}.in_proj_qkvz.weight": ("q_proj", "k_proj", "v_proj", "g_proj"),
        f"{theirs}.in_proj_ba.weight": ("b_proj", "a_proj"),
    }
    return (
        *(
            NameMapping(tuple(f"{ours}.{part}.weight" for part in parts), (name,), FusedByKeyHead())
            for name, parts in fused.items()
        ),
        *map_tensors({f"{ours}.conv_weight": f"{theirs}.conv1d.weight"}, ChannelConvolution()),
        *map_tensors({f"{ours}.{one}": f"{theirs}.{one}" for one in ("A_log", "dt_bias")}),
        *map_modules({f"{ours}.o_norm": f"{theirs}.norm", f"{ours}.o_proj": f"{theirs}.out_proj"}),
    )


def _map_gated_attention(layer: int) -> tuple[NameMapping, ...]:
    ours, theirs = f"blocks.{layer}.attention", f"model.layers.{layer}.self_attn"
    plain = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    queries = (f"{ours}.q_proj", f"{ours}.g_proj")
    return map_fused_module(queries, f"{theirs}.q_proj", QueriesWithGates()) + map_modules(
        {f"{ours}.{one}": f"{theirs}.{one}" for one in plain}
    )


def build_qwen3_next_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Qwen3-Next's mapping: the one of Qwen's experts, with the mixers layer by layer.

    Args:
        model: The architecture, for the type of each layer.

    Returns:
        The mapping.
    """
    shared = tuple(
        rule for rule in QWEN_MOE.rules if not any(".attention." in name for name in rule.ours)
    )
    mixers = tuple(
        rule
        for layer in range(model.num_hidden_layers)
        for rule in (
            _map_linear_attention(layer)
            if model.is_linear_layer(layer)
            else _map_gated_attention(layer)
        )
    )
    return FamilyMapping(shared + mixers, copies=TIED, ignored=(*TABLES, *PREDICTION))
