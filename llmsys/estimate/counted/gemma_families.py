"""The text model of Gemma 4: layers with sizes of their own, keys and values that the last layers
share, embeddings for each layer, and in one variant experts beside the feed-forward.
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from llmsys.config.module_tensors import ParameterTensor, iter_linear_parameters
from llmsys.estimate.counted.counted_model import AttentionTerm, CountedModel, place_rows
from llmsys.estimate.counted.dense_families import iter_tables
from llmsys.estimate.counted.layer_parts import (
    Rows,
    iter_experts,
    iter_feed_forward,
    iter_norm,
    iter_router,
)
from llmsys.estimate.counted.sizes import read_heads, read_size
from llmsys.hugging_face.config_json import ConfigJsonReader

NORMS = tuple(
    f"{place}_layernorm"
    for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")
)


class _LayerSizes(NamedTuple):
    """Sizes of a layer that others do not have.

    Attributes:
        width: channels of a head.
        pairs: key-value heads; 0 where those of an earlier layer are used.
        has_values: the layer has a projection for values, which else are the keys.
        window: positions that a query sees; None: all.
        wide: width of the feed-forward.
    """

    width: int
    pairs: int
    has_values: bool
    window: int | None
    wide: int


def build_gemma4(fields: ConfigJsonReader) -> CountedModel:
    """Return the text model of Gemma 4.

    Args:
        fields: reader of the config.json.

    Returns:
        The model.
    """
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    heads, _, _ = read_heads(fields, hidden)
    bias = fields.read_bool("attention_bias")
    placed: defaultdict[_LayerSizes, list[int]] = defaultdict(list)
    for layer, sizes in enumerate(_list_layer_sizes(fields, layers)):
        placed[sizes].append(layer)
    vocabulary, tied = read_size(fields, "vocab_size"), fields.read_bool("tie_word_embeddings")
    rows = [*iter_tables(vocabulary, hidden, tied=tied)]
    for sizes, own in placed.items():
        block = [
            *_iter_attention(hidden, heads, sizes, bias=bias),
            *iter_feed_forward("layers.{i}.mlp", hidden, sizes.wide),
        ]
        rows += place_rows(block, own)
    shared = [row for name in NORMS for row in iter_norm(f"layers.{{i}}.{name}", hidden)]
    experts = read_size(fields, "num_experts") if fields.read_bool("enable_moe_block") else 1
    visits = 1
    if fields.read_bool("enable_moe_block"):
        shared += _iter_mixture(hidden, experts, read_size(fields, "moe_intermediate_size"))
        visits = read_size(fields, "top_k_experts")
    else:
        fields.ignore_keys("num_experts", "moe_intermediate_size", "top_k_experts")
    inputs = fields.read_int("hidden_size_per_layer_input")
    lookup = read_size(fields, "vocab_size_per_layer_input")
    if inputs > 0:
        shared += [
            *iter_linear_parameters(
                "layers.{i}.per_layer_input_gate", inputs, hidden, False, "feed_forward"
            ),
            *iter_linear_parameters(
                "layers.{i}.per_layer_projection", hidden, inputs, False, "feed_forward"
            ),
            *iter_norm("layers.{i}.post_per_layer_input_norm", hidden),
        ]
        rows += [
            ParameterTensor(
                "embed_tokens_per_layer.weight", (lookup, layers * inputs), "embedding"
            ),
            *iter_linear_parameters(
                "per_layer_model_projection", layers * inputs, hidden, False, "feed_forward"
            ),
            *iter_norm("per_layer_projection_norm", inputs),
        ]
    rows += [*place_rows(shared, range(layers)), *iter_norm("norm", hidden)]
    terms: Counter[tuple[int, int | None]] = Counter()
    for sizes, own in placed.items():
        terms[sizes.width, sizes.window] += len(own)
    return CountedModel(
        "gemma4_text",
        tuple(rows),
        tuple(
            AttentionTerm(count, 2 * heads * width, window=window)
            for (width, window), count in terms.items()
        ),
        vocabulary * hidden if tied else 0,
        experts,
        visits,
        longest=fields.read_optional_int("max_position_embeddings"),
    )


def _list_layer_sizes(fields: ConfigJsonReader, layers: int) -> list[_LayerSizes]:
    """Return the sizes of each layer. Full attention has heads of another width, and the last
    layers use keys and values of earlier ones.
    """
    kinds = fields.read_str_list("layer_types") or [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(layers)
    ]
    kinds = [*kinds[: layers - 1], "full_attention"]  # the class forces the last one
    window = fields.read_optional_int("sliding_window")
    pairs, width = read_size(fields, "num_key_value_heads"), read_size(fields, "head_dim")
    keys_are_values = fields.read_bool("attention_k_eq_v")
    wide = read_size(fields, "intermediate_size")
    doubles = fields.read_bool("use_double_wide_mlp")
    first_shared = layers - fields.read_int("num_kv_shared_layers")
    full_pairs = fields.read_optional_int("num_global_key_value_heads")
    full_width = read_size(fields, "global_head_dim")
    own = _read_layer_overrides(fields)
    found = []
    for layer, kind in enumerate(kinds):
        is_full = kind == "full_attention"
        given = own.get(layer, {})
        other_pairs = full_pairs if is_full and keys_are_values and full_pairs else pairs
        other_width = width if not is_full or own else full_width
        reuses = layer >= first_shared
        found.append(
            _LayerSizes(
                given.get("head_dim", other_width),
                0 if reuses else given.get("num_key_value_heads", other_pairs),
                not (keys_are_values and is_full),
                None if is_full else window,
                2 * wide if doubles and reuses else wide,
            )
        )
    return found


def _read_layer_overrides(fields: ConfigJsonReader) -> dict[int, dict[str, int]]:
    """Return what `per_layer_config` says of single layers, whose numbers may be padded."""
    found: dict[int, dict[str, int]] = {}
    section = fields.read_section("per_layer_config", {})
    for key in section.values:
        layer = section.read_section(key, {})
        sizes = {
            name: read_size(layer, name)
            for name in ("head_dim", "num_key_value_heads")
            if layer.has_value(name)
        }
        section.merge_section(layer)
        if key.isdigit():
            found[int(key)] = sizes
        else:
            section.add_violation(key, "is not the number of a layer. Use 0, 1, 2, …")
    fields.merge_section(section)
    return found


def _iter_attention(hidden: int, heads: int, sizes: _LayerSizes, *, bias: bool) -> Rows:
    name, queries = "layers.{i}.self_attn", heads * sizes.width
    yield from iter_linear_parameters(f"{name}.q_proj", queries, hidden, bias, "attention")
    yield from iter_norm(f"{name}.q_norm", sizes.width)
    if sizes.pairs:
        keys = sizes.pairs * sizes.width
        for part in ("k_proj", "v_proj") if sizes.has_values else ("k_proj",):
            yield from iter_linear_parameters(f"{name}.{part}", keys, hidden, bias, "attention")
        yield from iter_norm(f"{name}.k_norm", sizes.width)
    yield from iter_linear_parameters(f"{name}.o_proj", hidden, queries, bias, "attention")


def _iter_mixture(hidden: int, experts: int, wide: int) -> Rows:
    yield from iter_router("layers.{i}.router", experts, hidden)
    yield ParameterTensor("layers.{i}.router.scale", (hidden,), "router")
    yield ParameterTensor("layers.{i}.router.per_expert_scale", (experts,), "router")
    yield from iter_experts("layers.{i}", experts, hidden, wide)
    for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1"):
        yield from iter_norm(f"layers.{{i}}.{name}", hidden)
    yield from iter_norm("layers.{i}.post_feedforward_layernorm_2", hidden)
