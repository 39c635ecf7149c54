"""Grow the tensors of a trained model to a deeper or wider one, or to experts that are copies of a
dense layer.

- Layers: block i is a copy of block i mod L (G_stack, Du 2024, arXiv:2405.15319). The model's
  function changes.
- Widths: a tensor is repeated, and along its input divided by the copies (HyperCloning, Samragh
  2024, arXiv:2409.12903). The model computes the same.
- Experts: each is a copy of the dense layer, and the router is new (Komatsuzaki 2022,
  arXiv:2212.05055). The model computes the same where the weights of the chosen experts sum to 1.

Invariants:
- Widths grow by whole factors, heads as whole heads; the vocabulary and the number of experts stay.
- A grown tensor is a function of the stored one, its name and the seed, equal on every rank.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmsys.config.layer_types import (
    ATTENTION_TYPES,
    LINEAR_TYPES,
    LayerType,
    has_feed_forward,
)
from llmsys.config.model import ModelConfig
from llmsys.data.shuffle import derive_order_key

# Standard deviation of the noise between copies of an input, in that of the tensor. It cancels in
# the output, and without it copies would have equal gradients for ever.
NOISE = 0.01

_BLOCK = re.compile(r"((?:encoder\.)?blocks)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.+)\.experts\.(\w+)_(proj|bias)")
_MAPS = re.compile(r".+\.(q|k|v|o|gate|up|down)_proj\.weight")
_VECTORS = re.compile(
    r"(.+_)?norm\.(weight|bias)|.+\.(attention_norm|feed_forward_norm)\.(weight|bias)|.+_proj\.bias"
)


@dataclass(frozen=True)
class Growth:
    """The rule that makes one parameter from a stored one.

    Attributes:
        source: Name of the stored parameter.
        repeats: Copies along each dim, without the dim of experts.
        input_dim: The dim of `repeats` that a product sums over; None for outputs only.
        num_experts: Experts that get a copy each; 0 for a tensor that is not made from a dense
            layer.
        is_transposed: The stored tensor is (out, in) and the parameter (in, out).
    """

    source: str
    repeats: tuple[int, ...]
    input_dim: int | None
    num_experts: int = 0
    is_transposed: bool = False


def find_growth(
    name: str, shape: tuple[int, ...], stored: Mapping[str, torch.Size]
) -> Growth | None:
    """Find the rule that makes a parameter from a stored one.

    Args:
        name: Parameter of the model to train.
        shape: Its shape.
        stored: Shapes of the stored parameters by name.

    Returns:
        The rule; None where the parameter has no source or its dims are no whole multiples.
    """
    source, from_dense = _find_source(name, stored)
    if source is None:
        return None
    theirs = tuple(stored[source])
    wanted = shape
    experts = 0
    if from_dense:
        experts = shape[0]
        wanted = shape[1:]
        # A dense weight is (out, in), an expert (in, out).
        theirs = theirs[::-1]
    growable, input_dim = _get_growable_dims(name)
    if from_dense:  # the dims of experts, without that of the experts themselves
        growable = {dim - 1 for dim in growable}
        input_dim = None if input_dim is None else input_dim - 1
    if len(theirs) != len(wanted) or any(
        new % old for new, old in zip(wanted, theirs, strict=True)
    ):
        return None
    repeats = tuple(new // old for new, old in zip(wanted, theirs, strict=True))
    if any(count > 1 and dim not in growable for dim, count in enumerate(repeats)):
        return None
    return Growth(
        source, repeats, input_dim, experts, is_transposed=from_dense and len(theirs) == 2
    )


def _find_source(name: str, stored: Mapping[str, torch.Size]) -> tuple[str | None, bool]:
    """Return the stored parameter that a parameter is made from, and whether it is a dense layer
    for experts.
    """
    if (match := _BLOCK.fullmatch(name)) is not None:
        blocks = match[1]
        number = int(match[2])
        rest = match[3]
        depth = 1 + max(
            (int(m[2]) for key in stored if (m := _BLOCK.fullmatch(key)) and m[1] == blocks),
            default=-1,
        )
        name = f"{blocks}.{number % depth}.{rest}" if depth else name
    if name in stored:
        return name, False
    if (expert := _EXPERT.fullmatch(name)) is not None:
        dense = f"{expert[1]}.{expert[2]}_proj.{'weight' if expert[3] == 'proj' else 'bias'}"
        return (dense, True) if dense in stored else (None, False)
    # A head that was tied begins as the embedding.
    is_untied = name == "head.weight" and "embed.weight" in stored
    return ("embed.weight" if is_untied else None), False


def _get_growable_dims(name: str) -> tuple[set[int], int | None]:
    """Return the dims that may be repeated, and the one that a product sums over."""
    if name == "embed.weight":
        return {1}, None
    if name == "head.weight" or name.endswith(".router.weight"):
        return {1}, 1
    if (expert := _EXPERT.fullmatch(name)) is not None:
        return ({1, 2}, 1) if expert[3] == "proj" else ({1}, None)
    if _MAPS.fullmatch(name):
        return {0, 1}, 1
    return ({0} if _VECTORS.fullmatch(name) else set()), None


def grow_tensor(source: Tensor, growth: Growth, key: tuple[str | int, ...]) -> Tensor:
    """Return a grown parameter.

    Args:
        source: The stored parameter, float32.
        growth: The rule.
        key: Seed of the noise between copies: the run's seed and the parameter's name.

    Returns:
        A new tensor.
    """
    grown = (source.T if growth.is_transposed else source).repeat(growth.repeats)
    dim = growth.input_dim
    if dim is not None and (copies := growth.repeats[dim]) > 1:
        # torch takes seeds of 63 bits.
        generator = torch.Generator().manual_seed(derive_order_key("growth", *key) >> 1)
        noise = torch.randn(grown.shape, generator=generator).unflatten(dim, (copies, -1))
        # Noise that sums to zero over the copies of an input leaves the output as it is.
        noise = (noise - noise.mean(dim, keepdim=True)).flatten(dim, dim + 1)
        grown = (grown + noise * (NOISE * float(source.std()))) / copies
    return (
        grown.expand(growth.num_experts, *grown.shape).contiguous() if growth.num_experts else grown
    )


def find_shape_violation(saved: Mapping[str, Any], model: ModelConfig) -> str | None:
    """Find the reason why a model cannot grow into another although the shapes of its tensors fit.

    Args:
        saved: The `model` section that the checkpoint was trained with.
        model: The model to train.

    Returns:
        A message with the next step, or None.
    """
    heads = saved["num_attention_heads"]
    groups = saved.get("num_key_value_heads") or saved["num_attention_heads"]
    size = saved.get("head_dim") or saved["hidden_size"] // heads
    if size != model.head_dim:
        wanted = model.num_attention_heads * (model.head_dim or size) // size
        return (
            f"heads of {size} channels cannot grow to {model.head_dim}: widths grow by whole "
            f"heads. Set model.num_attention_heads={wanted}."
        )
    ratio = model.num_attention_heads // (model.num_key_value_heads or model.num_attention_heads)
    if heads // groups != ratio:
        return (
            f"{heads // groups} attention heads share keys and values, and {ratio} in the model "
            "to train. Set "
            f"model.num_key_value_heads={max(1, model.num_attention_heads * groups // heads)}."
        )
    if model.tie_word_embeddings and model.hidden_size != saved["hidden_size"]:
        return (
            f"a tied head of {model.hidden_size} channels would add up equal channels and scale "
            "the logits. Set model.tie_word_embeddings=false."
        )
    return _find_layer_violation(saved, model)


def _find_layer_violation(saved: Mapping[str, Any], model: ModelConfig) -> str | None:
    """Find a block of another mixer than the one it would copy: names and shapes of projections may
    fit, but not what they mean.
    """
    depth = saved["num_hidden_layers"]
    types: tuple[LayerType, ...] = saved.get("layer_types") or ("full_attention",)
    feeds = saved.get("feed_forward_layers") or ()
    for layer in range(model.num_hidden_layers):
        source = layer % depth
        before = _describe_layer(types[source % len(types)], has_feed_forward(feeds, source))
        after = _describe_layer(model.get_layer_type(layer), model.has_feed_forward(layer))
        if before != after:
            return (
                f"block {layer} has {after}, and block {source}, which it would copy, has "
                f"{before}. Add layers in whole patterns of model.layer_types."
            )
    return None


def _describe_layer(layer_type: LayerType, feeds_forward: bool) -> str:
    """Return what a layer has, as text that differs where parameters do not fit."""
    kinds = {"attention": ATTENTION_TYPES, "linear_attention": LINEAR_TYPES}
    mixers = " and ".join(kind for kind, types in kinds.items() if layer_type in types)
    if not mixers:
        return "a feed-forward alone"
    return mixers if feeds_forward else f"{mixers} alone"
