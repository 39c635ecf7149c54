"""Name mappings of hybrids, whose layers mix positions in several ways: Qwen3-Next, Qwen3.5, Kimi
Linear, OLMo Hybrid, Bamba, Granite 4, Falcon-H1 and Nemotron-H; and of Mamba-2.

Source: the parameter names of the published checkpoints, as transformers reads and writes them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmsys.config.linear_attention import BaseDeltaConfig, GatedDeltaConfig, Mamba2Config
from llmsys.config.model import ModelConfig
from llmsys.convert.decoder_mappings import (
    GRANITE_EXPERTS,
    LLAMA,
    MIXTRAL,
    MIXTURE,
    OLMO2,
    QWEN_MOE,
    TABLES,
    TIED,
)
from llmsys.convert.name_mapping import (
    FamilyMapping,
    FusedRows,
    NameMapping,
    Transpose,
    map_fused_module,
    map_modules,
    map_tensors,
)

# Modules for multi-token prediction, which transformers' class does not build.
PREDICTION = (r"^mtp\.",)
# Qwen3.5's published files hold a model of images and texts.
VISION = (r"^model\.visual\.",)
OUTER = {"model.language_model.": "model."}
# What Bamba and Falcon-H1 have besides mixers.
_BAMBA = {
    "embed": "model.embed_tokens",
    "norm": "model.final_layernorm",
    "head": "lm_head",
    "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "blocks.{i}.feed_forward_norm": "model.layers.{i}.pre_ff_layernorm",
} | {
    f"blocks.{{i}}.feed_forward.{one}": f"model.layers.{{i}}.feed_forward.{one}"
    for one in ("gate_proj", "up_proj", "down_proj")
}
# What Mamba-2 and Nemotron-H have besides their layers.
_BACKBONE = {"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"}


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
class FusedChannels:
    """Queries, keys and values of linear attention in one projection of theirs, one after another
    (Qwen3.5).
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return three projections."""
        linear = _get_linear_attention(model)
        keys = linear.key_channels
        return list(theirs[0].split([keys, keys, linear.value_channels]))

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one projection."""
        return [torch.cat(ours)]


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
    assert isinstance(model.linear_attention, GatedDeltaConfig)
    return model.linear_attention


def _build_mixer_names(layer: int) -> tuple[str, str]:
    """Return our name and theirs of a mixer with a state."""
    return f"blocks.{layer}.attention", f"model.layers.{layer}.linear_attn"


def _map_delta_rest(layer: int) -> tuple[NameMapping, ...]:
    """Return what a gated delta net has besides the projections into it."""
    ours, theirs = _build_mixer_names(layer)
    return (
        *map_tensors({f"{ours}.conv_weight": f"{theirs}.conv1d.weight"}, ChannelConvolution()),
        *map_tensors({f"{ours}.{one}": f"{theirs}.{one}" for one in ("A_log", "dt_bias")}),
        *map_modules({f"{ours}.o_norm": f"{theirs}.norm", f"{ours}.o_proj": f"{theirs}.out_proj"}),
    )


def _map_fused_delta_net(layer: int) -> tuple[NameMapping, ...]:
    """Return Qwen3-Next's mixer, whose projections are two tensors."""
    ours, theirs = _build_mixer_names(layer)
    fused = {
        f"{theirs}.in_proj_qkvz.weight": ("q_proj", "k_proj", "v_proj", "g_proj"),
        f"{theirs}.in_proj_ba.weight": ("b_proj", "a_proj"),
    }
    return (
        *(
            NameMapping(tuple(f"{ours}.{part}.weight" for part in parts), (name,), FusedByKeyHead())
            for name, parts in fused.items()
        ),
        *_map_delta_rest(layer),
    )


def _map_delta_net(layer: int) -> tuple[NameMapping, ...]:
    """Return Qwen3.5's mixer, whose projections are four tensors."""
    ours, theirs = _build_mixer_names(layer)
    channels = tuple(f"{ours}.{one}_proj.weight" for one in ("q", "k", "v"))
    plain = {"g_proj": "in_proj_z", "b_proj": "in_proj_b", "a_proj": "in_proj_a"}
    return (
        NameMapping(channels, (f"{theirs}.in_proj_qkv.weight",), FusedChannels()),
        *map_modules({f"{ours}.{one}": f"{theirs}.{name}" for one, name in plain.items()}),
        *_map_delta_rest(layer),
    )


def _map_gated_attention(layer: int) -> tuple[NameMapping, ...]:
    ours, theirs = f"blocks.{layer}.attention", f"model.layers.{layer}.self_attn"
    plain = ("k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    queries = (f"{ours}.q_proj", f"{ours}.g_proj")
    return map_fused_module(queries, f"{theirs}.q_proj", QueriesWithGates()) + map_modules(
        {f"{ours}.{one}": f"{theirs}.{one}" for one in plain}
    )


def _map_delta_layers(
    model: ModelConfig, rest: FamilyMapping, map_mixer: Callable[[int], tuple[NameMapping, ...]]
) -> tuple[NameMapping, ...]:
    """Return the rules of `rest` without attention, and those of the mixers layer by layer."""
    shared = tuple(
        rule for rule in rest.rules if not any(".attention." in name for name in rule.ours)
    )
    mixers = tuple(
        rule
        for layer in range(model.num_hidden_layers)
        for rule in (
            map_mixer(layer) if model.is_linear_layer(layer) else _map_gated_attention(layer)
        )
    )
    return shared + mixers


def build_qwen3_next_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Qwen3-Next's mapping: the one of Qwen's experts, with the mixers layer by layer.

    Args:
        model: The architecture, for the type of each layer.

    Returns:
        The mapping.
    """
    rules = _map_delta_layers(model, QWEN_MOE, _map_fused_delta_net)
    return FamilyMapping(rules, copies=TIED, ignored=(*TABLES, *PREDICTION))


def build_qwen3_5_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Qwen3.5's mapping, of dense models and of those with experts.

    Args:
        model: The architecture, for the type of each layer.

    Returns:
        The mapping, which reads files with a model of images too.
    """
    rules = _map_delta_layers(model, LLAMA if model.moe is None else QWEN_MOE, _map_delta_net)
    return FamilyMapping(rules, copies=TIED, ignored=(*TABLES, *PREDICTION, *VISION), outer=OUTER)


@dataclass(frozen=True)
class ChannelConvolutions:
    """Weights of a convolution channel by channel: of queries, keys and values each, (C, 1, W), in
    theirs, and of all, (D, W), in ours (Kimi Linear, OLMo Hybrid).
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one matrix."""
        return [torch.cat([one[:, 0] for one in theirs])]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return three convolution weights."""
        linear = model.linear_attention
        assert isinstance(linear, BaseDeltaConfig)
        sizes = [linear.key_channels, linear.key_channels, linear.value_channels]
        return [one[:, None] for one in ours[0].split(sizes)]


@dataclass(frozen=True)
class HeadRates:
    """A number of each head, (1, 1, H, 1) in theirs and (H) in ours (Kimi Linear)."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return vectors."""
        return [one[0, 0, :, 0] for one in theirs]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return them with three more dims."""
        return [one[None, None, :, None] for one in ours]


def build_kimi_linear_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Kimi Linear's mapping. Both kinds of attention have one name in it.

    Args:
        model: The architecture, for the layers without experts.

    Returns:
        The mapping. It reads dense layers under the name of experts too, which transformers writes.
    """
    ours, theirs = "blocks.{i}.attention", "model.layers.{i}.self_attn"
    plain = ("b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_norm")
    names = {f"{ours}.{one}": f"{theirs}.{one}" for one in plain}
    shared = {
        f"blocks.{{i}}.feed_forward.shared.{one}": f"{MIXTURE}.shared_experts.{one}"
        for one in ("gate_proj", "up_proj", "down_proj")
    }
    convolutions = tuple(f"{theirs}.{one}_conv1d.weight" for one in ("q", "k", "v"))
    balance = {"blocks.{i}.feed_forward.balance_bias_E": f"{MIXTURE}.gate.e_score_correction_bias"}
    rules = (
        *MIXTRAL.rules,
        *map_modules(names | shared),
        *map_tensors(balance | {f"{ours}.dt_bias": f"{theirs}.dt_bias"}),
        *map_tensors({f"{ours}.A_log": f"{theirs}.A_log"}, HeadRates()),
        NameMapping((f"{ours}.conv_weight",), convolutions, ChannelConvolutions()),
    )
    dense = [layer for layer in range(model.num_hidden_layers) if not model.is_moe_layer(layer)]
    outer = {f"model.layers.{one}.block_sparse_moe.": f"model.layers.{one}.mlp." for one in dense}
    return FamilyMapping(rules, copies=TIED, ignored=TABLES, outer=outer)


@dataclass(frozen=True)
class MambaProjections:
    """All projections of Mamba-2 in one tensor of theirs: gates, values, keys, queries, steps."""

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return the projections."""
        linear = _get_mamba2(model)
        keys, values = linear.key_channels, linear.value_channels
        return list(theirs[0].split([values, values, keys, keys, linear.num_value_heads]))

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return one tensor."""
        return [torch.cat(ours)]


@dataclass(frozen=True)
class MambaConvolution:
    """Channels of Mamba-2's convolution: values, keys, queries in theirs, and the reverse in ours;
    weights have a dim of one input channel in theirs.
    """

    def from_hugging_face(self, theirs: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return rows of queries, keys and values."""
        linear = _get_mamba2(model)
        sizes = [linear.value_channels, linear.key_channels, linear.key_channels]
        turned = [torch.cat(one.split(sizes)[::-1]) for one in theirs]
        return [one[:, 0] if one.ndim == 3 else one for one in turned]

    def to_hugging_face(self, ours: list[Tensor], model: ModelConfig) -> list[Tensor]:
        """Return rows of values, keys and queries."""
        linear = _get_mamba2(model)
        sizes = [linear.key_channels, linear.key_channels, linear.value_channels]
        turned = [torch.cat(one.split(sizes)[::-1]) for one in ours]
        return [one[:, None] if one.ndim == 2 else one for one in turned]


def _get_mamba2(model: ModelConfig) -> Mamba2Config:
    assert isinstance(model.linear_attention, Mamba2Config)
    return model.linear_attention


def _map_mamba2(ours: str, theirs: str) -> tuple[NameMapping, ...]:
    """Return the mixer, by our name and theirs."""
    parts = tuple(f"{ours}.{one}_proj.weight" for one in ("g", "v", "k", "q", "a"))
    convolution = {f"{ours}.conv_{one}": f"{theirs}.conv1d.{one}" for one in ("weight", "bias")}
    return (
        NameMapping(parts, (f"{theirs}.in_proj.weight",), MambaProjections()),
        *map_tensors(convolution, MambaConvolution()),
        *map_tensors({f"{ours}.{one}": f"{theirs}.{one}" for one in ("A_log", "dt_bias", "D")}),
        *map_modules({f"{ours}.o_norm": f"{theirs}.norm", f"{ours}.o_proj": f"{theirs}.out_proj"}),
    )


def _map_mamba_layers(model: ModelConfig) -> tuple[NameMapping, ...]:
    """Return the mixers layer by layer: Mamba-2 or attention."""
    mixers: tuple[NameMapping, ...] = ()
    for layer in range(model.num_hidden_layers):
        if model.is_linear_layer(layer):
            mixers += _map_mamba2(f"blocks.{layer}.attention", f"model.layers.{layer}.mamba")
            continue
        names = {
            f"blocks.{layer}.attention.{one}": f"model.layers.{layer}.self_attn.{one}"
            for one in ("q_proj", "k_proj", "v_proj", "o_proj")
        }
        mixers += map_modules(names)
    return mixers


def build_bamba_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Bamba's mapping, with the mixers layer by layer.

    Args:
        model: The architecture, for the type of each layer.

    Returns:
        The mapping.
    """
    return FamilyMapping(
        map_modules(_BAMBA) + _map_mamba_layers(model), copies=TIED, ignored=TABLES
    )


def build_granite_hybrid_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Granite 4's mapping, with the mixers layer by layer. The shared expert is the
    feed-forward of a model without experts.

    Args:
        model: The architecture, for the type of each layer.

    Returns:
        The mapping.
    """
    ours, theirs = "blocks.{i}", "model.layers.{i}"
    dense = f"{ours}.feed_forward" if model.moe is None else f"{ours}.feed_forward.shared"
    names = {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        f"{ours}.attention_norm": f"{theirs}.input_layernorm",
        f"{ours}.feed_forward_norm": f"{theirs}.post_attention_layernorm",
        f"{dense}.down_proj": f"{theirs}.shared_mlp.output_linear",
    }
    gate_up = (f"{dense}.gate_proj", f"{dense}.up_proj")
    rules = (
        map_modules(names)
        + map_fused_module(gate_up, f"{theirs}.shared_mlp.input_linear", FusedRows())
        + GRANITE_EXPERTS
        + _map_mamba_layers(model)
    )
    return FamilyMapping(rules, copies=TIED, ignored=TABLES)


def build_mamba2_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Mamba-2's mapping.

    Args:
        model: Not used: all layers are alike.

    Returns:
        The mapping.
    """
    theirs = "backbone.layers.{i}"
    names = _BACKBONE | {"blocks.{i}.attention_norm": f"{theirs}.norm"}
    return FamilyMapping(
        map_modules(names) + _map_mamba2("blocks.{i}.attention", f"{theirs}.mixer"),
        copies={"lm_head.weight": "backbone.embeddings.weight"},
        aliases={"embedding.weight": "embeddings.weight"},
    )


def build_nemotron_h_mapping(model: ModelConfig) -> FamilyMapping:
    """Build Nemotron-H's mapping: the one sub-layer of each layer has one name.

    Args:
        model: The architecture, for the sub-layer of each layer.

    Returns:
        The mapping.
    """
    rules = map_modules(_BACKBONE)
    for layer in range(model.num_hidden_layers):
        branch = "attention" if model.list_mixers(layer) else "feed_forward"
        ours, theirs = f"blocks.{layer}.{branch}", f"backbone.layers.{layer}.mixer"
        rules += map_modules({f"{ours}_norm": f"backbone.layers.{layer}.norm"})
        if model.is_linear_layer(layer):
            rules += _map_mamba2(ours, theirs)
            continue
        plain = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
        latent = ("fc1_latent_proj", "fc2_latent_proj")
        names = {f"{ours}.{one}": f"{theirs}.{one}" for one in (*plain, *latent)}
        names[f"{ours}.router"] = f"{theirs}.gate"
        experts: dict[str, str] = {}
        for one in ("up_proj", "down_proj"):
            names[f"{ours}.shared.{one}"] = f"{theirs}.shared_experts.{one}"
            experts[f"{ours}.experts.{one}"] = f"{theirs}.experts.{{e}}.{one}.weight"
        rules += map_modules(names) + map_tensors(experts, Transpose())
        balance = {f"{ours}.balance_bias_E": f"{theirs}.gate.e_score_correction_bias"}
        rules += map_tensors(balance)
    return FamilyMapping(rules, ignored=PREDICTION, outer={"model.": "backbone."})


def build_olmo_hybrid_mapping(model: ModelConfig) -> FamilyMapping:
    """Build OLMo Hybrid's mapping: OLMo 2's, with other names in layers of linear attention.

    Args:
        model: The architecture, for the type of each layer.

    Returns:
        The mapping. It reads the names that transformers writes too.
    """
    own = (".attention.", ".attention_norm.", ".feed_forward_norm.")
    rules = tuple(
        rule for rule in OLMO2.rules if not any(one in name for name in rule.ours for one in own)
    )
    outer: dict[str, str] = {}
    for layer in range(model.num_hidden_layers):
        block, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        ours, first, second = f"{block}.attention", "attention_layer_norm", "feedforward_layer_norm"
        if not model.is_linear_layer(layer):
            plain = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
            rules += map_modules({f"{ours}.{one}": f"{theirs}.self_attn.{one}" for one in plain})
            outer[f"{theirs}.{second}."] = f"{theirs}.post_attention_layernorm."
            continue
        mixer = f"{theirs}.linear_attn"
        names = {f"{ours}.{one}_proj": f"{mixer}.{one}_proj" for one in "qkvgbao"}
        names |= {
            f"{ours}.o_norm": f"{mixer}.o_norm",
            f"{block}.attention_norm": f"{theirs}.{first}",
            f"{block}.feed_forward_norm": f"{theirs}.{second}",
        }
        convolutions = tuple(f"{mixer}.{one}_conv1d.weight" for one in "qkv")
        rules += map_modules(names)
        rules += map_tensors({f"{ours}.{one}": f"{mixer}.{one}" for one in ("A_log", "dt_bias")})
        rules += (NameMapping((f"{ours}.conv_weight",), convolutions, ChannelConvolutions()),)
        outer[f"{theirs}.input_layernorm."] = f"{theirs}.{first}."
        outer[f"{theirs}.post_attention_layernorm."] = f"{theirs}.{second}."
    return FamilyMapping(rules, copies=TIED, ignored=TABLES, outer=outer)


_ATTENTION = {
    f"blocks.{{i}}.attention.{one}": f"model.layers.{{i}}.self_attn.{one}"
    for one in ("q_proj", "k_proj", "v_proj", "o_proj")
}
FALCON_H1 = FamilyMapping(
    map_modules(_BAMBA | _ATTENTION)
    + _map_mamba2("blocks.{i}.linear_attention", "model.layers.{i}.mamba"),
    copies=TIED,
    ignored=TABLES,
)
