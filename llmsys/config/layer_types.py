"""Kinds of layers (`model.layer_types`), and which sub-layers a layer has
(`model.feed_forward_layers`).

Invariants:
- Every layer has attention, linear attention or a feed-forward.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from llmsys.errors import Violation

LayerType = Literal[
    "full_attention", "sliding_attention", "linear_attention", "hybrid", "feed_forward"
]

# With keys and values of `model.attention`, and with the states of `model.linear_attention`.
ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "hybrid"})
LINEAR_TYPES = frozenset({"linear_attention", "hybrid"})
# Kinds of `model.attention` that are proven beside layers of other parts.
ATTENTION_KINDS = ("multi_head", "latent")


def has_feed_forward(feed_forward_layers: Sequence[bool], layer: int) -> bool:
    """Return whether a layer has a feed-forward.

    Args:
        feed_forward_layers: `model.feed_forward_layers`, which repeats; empty: all have one.
        layer: number of the layer, counted from 0.

    Returns:
        True for the layers whose entry is true.
    """
    return not feed_forward_layers or feed_forward_layers[layer % len(feed_forward_layers)]


def find_layer_violations(model: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what is wrong with the kinds of layers, with keys below `model`.

    Args:
        model: fields of a ModelConfig.
    """
    layer_types, feeds = model["layer_types"], model["feed_forward_layers"]
    layers = model["num_hidden_layers"]
    if "sliding_attention" in layer_types and model["sliding_window"] is None:
        yield Violation(
            "sliding_window",
            "layer_types has sliding_attention, but the width is missing. Set it, e.g. to 4096.",
        )
    for key, what in (("layer_types", "kinds"), ("feed_forward_layers", "entries")):
        if len(model[key]) > layers:
            yield Violation(
                key,
                f"{len(model[key])} {what} for num_hidden_layers={layers}. Give {layers}, or a "
                "shorter list that repeats.",
            )
    if "feed_forward" in layer_types or not all(feeds):
        yield from _find_lacking_violations(layer_types, feeds, layers)
        yield from _find_unproven_choices(model)


def _find_lacking_violations(
    layer_types: Sequence[LayerType], feed_forward_layers: Sequence[bool], num_layers: int
) -> Iterator[Violation]:
    """Yield a layer without any part, and a model whose layers mix no positions."""
    kinds = [layer_types[n % len(layer_types)] if layer_types else "" for n in range(num_layers)]
    for layer, kind in enumerate(kinds):
        if kind == "feed_forward" and not has_feed_forward(feed_forward_layers, layer):
            yield Violation(
                "feed_forward_layers",
                f"layer {layer} of type feed_forward has none. Set its entry to true, or give "
                "the layer attention in layer_types.",
            )
            break
    if {*kinds} == {"feed_forward"}:
        yield Violation(
            "layer_types", "no layer mixes positions. Add full_attention or linear_attention."
        )


def _find_unproven_choices(model: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield choices that are not proven with layers that lack a sub-layer."""
    residual = model["residual"]
    wrong = {
        "family": ("decoder", model["family"] != "decoder"),
        "residual.kind": ("pre", residual.is_parallel or residual.is_reversible),
        "recurrence": ("null", model["recurrence"] is not None),
        "multi_token_prediction": ("null", model["multi_token_prediction"] is not None),
        "parametrization.kind": ("standard", model["parametrization"].kind != "standard"),
        "attention.kind": ("multi_head", model["attention"].kind not in ATTENTION_KINDS),
        "feed_forward.kind": ("swiglu", model["feed_forward"].kind == "python"),
    }
    for key, (legal, is_wrong) in wrong.items():
        if is_wrong:
            yield Violation(
                key, f"it is not proven with layers that lack a sub-layer. Use {legal}."
            )
