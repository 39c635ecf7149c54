"""Decoders that are nearly Llama, and two encoders: apertus, hunyuan, lfm2, llama4,
modernbert, esm.

Each `build_` function takes a reader whose defaults are those of transformers' config class.
"""

from collections.abc import Iterable
from dataclasses import replace

from llmsys.config.module_tensors import ParameterTensor, iter_linear_parameters
from llmsys.estimate.counted.counted_model import AttentionTerm, CountedModel, place_rows
from llmsys.estimate.counted.dense_families import build_decoder, iter_tables
from llmsys.estimate.counted.layer_parts import (
    AttentionSizes,
    Rows,
    iter_attention,
    iter_convolution,
    iter_experts,
    iter_feed_forward,
    iter_norm,
    iter_router,
)
from llmsys.estimate.counted.sizes import read_heads, read_size
from llmsys.hugging_face.config_json import ConfigJsonReader

NORMS = ("input_layernorm", "post_attention_layernorm")


def build_apertus(fields: ConfigJsonReader) -> CountedModel:
    """Return Apertus: xIELU, whose two slopes are trained in each layer, without a gate."""
    bias = fields.read_bool("attention_bias")
    model = build_decoder(fields, gated=False, attention_bias=bias, qk_norm="head")
    slopes = [
        ParameterTensor(f"layers.{{i}}.mlp.act_fn.{name}", (1,), "feed_forward")
        for name in ("alpha_p", "alpha_n")
    ]
    layers = range(fields.read_int("num_hidden_layers"))
    return replace(model, rows=(*model.rows, *place_rows(slopes, layers)))


def build_hunyuan_dense(fields: ConfigJsonReader) -> CountedModel:
    """Return Hunyuan's dense models, which normalize queries and keys after the rotation."""
    bias = fields.read_bool("attention_bias")
    return build_decoder(fields, attention_bias=bias, qk_norm="head")


def _read_equal_layers(fields: ConfigJsonReader, name: str) -> int:
    """Return a size that a file gives once, or once for each layer."""
    given = fields.values.get(name)
    if not isinstance(given, list):
        return read_size(fields, name)
    sizes = fields.read_int_list(name) or [1]
    if len(set(sizes)) > 1:
        fields.add_violation(name, "differs between layers. Only equal layers are counted.")
    return sizes[0]


def build_hunyuan_experts(fields: ConfigJsonReader) -> CountedModel:
    """Return Hunyuan's mixtures: in each layer a shared expert beside the routed ones."""
    hidden, wide = read_size(fields, "hidden_size"), read_size(fields, "intermediate_size")
    experts = _read_equal_layers(fields, "num_experts")
    shared = iter_feed_forward(
        "layers.{i}.mlp.shared_mlp", hidden, wide, component="shared_experts"
    )
    mixture = [
        *iter_router("layers.{i}.mlp", experts, hidden),
        *iter_experts("layers.{i}.mlp", experts, hidden, wide),
        *shared,
    ]
    dense = build_decoder(fields, attention_bias=fields.read_bool("attention_bias"), qk_norm="head")
    layers = range(fields.read_int("num_hidden_layers"))
    rows = [row for row in dense.rows if row.component != "feed_forward"]
    rows += place_rows(mixture, layers)
    visits = _read_equal_layers(fields, "moe_topk")
    return replace(dense, rows=tuple(rows), experts=experts, visits=visits)


def build_llama4(fields: ConfigJsonReader) -> CountedModel:
    """Return the text model of Llama 4: chunks of attention in three of four layers, experts
    beside a shared one in every n-th.
    """
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    experts, wide = read_size(fields, "num_local_experts"), read_size(fields, "intermediate_size")
    step = read_size(fields, "interleave_moe_layer_step")
    sparse = fields.read_int_list("moe_layers") or list(range(step - 1, layers, step))
    mixture = [
        *iter_router("layers.{i}.feed_forward", experts, hidden),
        *iter_experts("layers.{i}.feed_forward", experts, hidden, wide),
        *iter_feed_forward(
            "layers.{i}.feed_forward.shared_expert", hidden, wide, component="shared_experts"
        ),
    ]
    heads, pairs, width = read_heads(fields, hidden)
    bias = fields.read_bool("attention_bias")
    sizes = AttentionSizes(hidden, heads, pairs, width, bias, bias)
    dense = iter_feed_forward(
        "layers.{i}.feed_forward", hidden, read_size(fields, "intermediate_size_mlp")
    )
    vocabulary, tied = read_size(fields, "vocab_size"), fields.read_bool("tie_word_embeddings")
    block = [*iter_attention("layers.{i}.self_attn", sizes), *_iter_norms(NORMS, hidden)]
    rows = [
        *iter_tables(vocabulary, hidden, tied=tied),
        *place_rows(block, range(layers)),
        *place_rows(mixture, sparse),
        *place_rows(dense, [layer for layer in range(layers) if layer not in sparse]),
        *iter_norm("norm", hidden),
    ]
    kinds = _read_chunked_layers(fields, layers)
    chunk = fields.read_optional_int("attention_chunk_size")
    chunked = kinds.count("chunked_attention")
    terms = (
        AttentionTerm(chunked, sizes.products, chunk=chunk),
        AttentionTerm(layers - chunked, sizes.products),
    )
    return CountedModel(
        "llama4_text",
        tuple(rows),
        terms,
        vocabulary * hidden if tied else 0,
        experts,
        read_size(fields, "num_experts_per_tok"),
        longest=fields.read_optional_int("max_position_embeddings"),
    )


def _read_chunked_layers(fields: ConfigJsonReader, layers: int) -> list[str]:
    """Return the type of each layer: those with RoPE see a chunk."""
    interval = read_size(fields, "no_rope_layer_interval")
    rotates = fields.read_int_list("no_rope_layers") or [
        int((layer + 1) % interval != 0) for layer in range(layers)
    ]
    return fields.read_str_list("layer_types") or [
        "chunked_attention" if rotated else "full_attention" for rotated in rotates
    ]


def _iter_norms(names: Iterable[str], hidden: int, *, bias: bool = False) -> Rows:
    for name in names:
        yield from iter_norm(f"layers.{{i}}.{name}", hidden, bias=bias)


def build_lfm2(fields: ConfigJsonReader) -> CountedModel:
    """Return LFM2: gated short convolutions, and attention in some layers."""
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    heads, pairs, width = read_heads(fields, hidden)
    sizes = AttentionSizes(hidden, heads, pairs, width, qk_norm="head")
    given = fields.values.get("full_attn_idxs")
    chosen = fields.read_int_list("full_attn_idxs") if given is not None else range(layers)
    kinds = fields.read_str_list("layer_types") or [
        "full_attention" if layer in chosen else "conv" for layer in range(layers)
    ]
    attends = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    bias = fields.read_bool("conv_bias")
    convolution = [
        *iter_convolution(
            "layers.{i}.conv.conv1d", hidden, read_size(fields, "conv_L_cache"), bias=bias
        ),
        *iter_linear_parameters("layers.{i}.conv.in_proj", 3 * hidden, hidden, bias, "recurrent"),
        *iter_linear_parameters("layers.{i}.conv.out_proj", hidden, hidden, bias, "recurrent"),
    ]
    block = [
        *iter_feed_forward("layers.{i}.feed_forward", hidden, _read_adjusted_width(fields)),
        *_iter_norms(("operator_norm", "ffn_norm"), hidden),
    ]
    vocabulary = read_size(fields, "vocab_size")
    tied = fields.read_bool("tie_embedding", "tie_word_embeddings")
    rows = [
        *iter_tables(vocabulary, hidden, tied=tied),
        *place_rows(iter_attention("layers.{i}.self_attn", sizes), attends),
        *place_rows(convolution, [layer for layer in range(layers) if layer not in attends]),
        *place_rows(block, range(layers)),
        *iter_norm("embedding_norm", hidden),
    ]
    return CountedModel(
        "lfm2",
        tuple(rows),
        (AttentionTerm(len(attends), sizes.products),),
        vocabulary * hidden if tied else 0,
        longest=fields.read_optional_int("max_position_embeddings"),
    )


def _read_adjusted_width(fields: ConfigJsonReader) -> int:
    """Return the width of LFM2's feed-forward: two thirds, rounded up to a multiple."""
    width = read_size(fields, "block_ff_dim", "intermediate_size")
    multiple = read_size(fields, "block_multiple_of")
    factor = fields.read_optional_float("block_ffn_dim_multiplier")
    if not fields.read_bool("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if factor is None:
        return width
    return multiple * -(-int(factor * width) // multiple)


def build_modernbert(fields: ConfigJsonReader) -> CountedModel:
    """Return ModernBERT with its head for masked tokens: a gate, and in two of three layers
    windows on either side. The first layer has no norm before attention.
    """
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    heads, pairs, width = read_heads(fields, hidden)
    wide, vocabulary = read_size(fields, "intermediate_size"), read_size(fields, "vocab_size")
    bias, norm_bias = fields.read_bool("attention_bias"), fields.read_bool("norm_bias")
    sizes = AttentionSizes(hidden, heads, pairs, width, bias, bias)
    every = fields.read_optional_int("global_attn_every_n_layers") or 3
    kinds = fields.read_str_list("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(layers)
    ]
    block = [
        *iter_attention("layers.{i}.attn", sizes),
        *iter_feed_forward("layers.{i}.mlp", hidden, wide, bias=fields.read_bool("mlp_bias")),
        *_iter_norms(("mlp_norm",), hidden, bias=norm_bias),
    ]
    tied = fields.read_bool("tie_word_embeddings")
    rows = [
        *iter_tables(vocabulary, hidden, tied=tied),
        *iter_norm("embeddings.norm", hidden, bias=norm_bias),
        *place_rows(block, range(layers)),
        *place_rows(_iter_norms(("attn_norm",), hidden, bias=norm_bias), range(1, layers)),
        *iter_norm("final_norm", hidden, bias=norm_bias),
        *iter_linear_parameters(
            "head.dense", hidden, hidden, fields.read_bool("classifier_bias"), "head_other"
        ),
        *iter_norm("head.norm", hidden, bias=norm_bias),
    ]
    if fields.read_bool("decoder_bias"):
        rows.append(ParameterTensor("decoder.bias", (vocabulary,), "head_bias"))
    sliding = kinds.count("sliding_attention")
    side = read_size(fields, "local_attention") // 2
    terms = (
        AttentionTerm(layers - sliding, sizes.products, "source"),
        AttentionTerm(sliding, sizes.products, "source", window=side),
    )
    return CountedModel(
        "modernbert",
        tuple(rows),
        terms,
        vocabulary * hidden if tied else 0,
        longest=fields.read_optional_int("max_position_embeddings"),
    )


def build_esm(fields: ConfigJsonReader) -> CountedModel:
    """Return ESM-2 with its head for masked tokens, and the regression that reads contacts from
    attention maps.
    """
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    heads, pairs, width = read_heads(fields, hidden)
    wide, vocabulary = read_size(fields, "intermediate_size"), read_size(fields, "vocab_size")
    sizes = AttentionSizes(hidden, heads, pairs, width, True, True)
    block = [
        *iter_attention("layers.{i}.attention", sizes),
        *iter_feed_forward("layers.{i}.feed_forward", hidden, wide, gated=False, bias=True),
        *_iter_norms(("attention.LayerNorm", "LayerNorm"), hidden, bias=True),
    ]
    tied = fields.read_bool("tie_word_embeddings")
    rows = [*iter_tables(vocabulary, hidden, tied=tied), *place_rows(block, range(layers))]
    if fields.read_str("position_embedding_type") == "absolute":
        longest = read_size(fields, "max_position_embeddings")
        rows.append(ParameterTensor("position_embeddings.weight", (longest, hidden), "positions"))
    if fields.read_bool("emb_layer_norm_before"):
        rows += iter_norm("embeddings.layer_norm", hidden, bias=True)
    rows += [
        *iter_norm("emb_layer_norm_after", hidden, bias=True),
        ParameterTensor("contact_head.regression.weight", (1, layers * heads), "head_other"),
        ParameterTensor("contact_head.regression.bias", (1,), "head_other"),
        *iter_linear_parameters("lm_head.dense", hidden, hidden, True, "head_other"),
        *iter_norm("lm_head.layer_norm", hidden, bias=True),
        ParameterTensor("lm_head.bias", (vocabulary,), "head_bias"),
    ]
    return CountedModel(
        "esm",
        tuple(rows),
        (AttentionTerm(layers, sizes.products, "source"),),
        vocabulary * hidden if tied else 0,
        longest=fields.read_optional_int("max_position_embeddings"),
    )
