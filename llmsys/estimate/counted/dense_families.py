"""Decoders with attention in every layer, and mT5: phi3, cohere, ministral3.

Each `build_` function takes a reader whose defaults are those of transformers' config class.
"""

from llmsys.config.module_tensors import Component, ParameterTensor, iter_linear_parameters
from llmsys.estimate.counted.counted_model import AttentionTerm, CountedModel, place_rows
from llmsys.estimate.counted.layer_parts import (
    AttentionSizes,
    Rows,
    iter_attention,
    iter_feed_forward,
    iter_norm,
)
from llmsys.estimate.counted.sizes import read_heads, read_layer_windows, read_size
from llmsys.hugging_face.config_json import ConfigJsonReader


def build_decoder(
    fields: ConfigJsonReader,
    *,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    gated: bool = True,
    attention_bias: bool = False,
    qk_norm: str = "none",
) -> CountedModel:
    """Return a decoder of equal blocks.

    Args:
        fields: reader of the config.json.
        norms: names of the norms in a block.
        gated: the feed-forward has a gate.
        attention_bias: all four projections have biases.
        qk_norm: norms of queries and keys, see `AttentionSizes`.

    Returns:
        The model.
    """
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    heads, pairs, width = read_heads(fields, hidden)
    sizes = AttentionSizes(hidden, heads, pairs, width, attention_bias, attention_bias, qk_norm)  # type: ignore[arg-type]
    block = [
        *iter_attention("layers.{i}.self_attn", sizes),
        *iter_feed_forward(
            "layers.{i}.mlp",
            hidden,
            read_size(fields, "intermediate_size"),
            gated=gated,
        ),
        *(row for name in norms for row in iter_norm(f"layers.{{i}}.{name}", hidden)),
    ]
    vocabulary, tied = read_size(fields, "vocab_size"), fields.read_bool("tie_word_embeddings")
    rows = [*iter_tables(vocabulary, hidden, tied=tied), *place_rows(block, range(layers))]
    rows += iter_norm("norm", hidden)
    windows = read_layer_windows(fields, layers)
    terms = tuple(
        AttentionTerm(count, sizes.products, window=window) for window, count in windows.items()
    )
    longest = fields.read_optional_int("max_position_embeddings")
    name = str(fields.values["model_type"])
    return CountedModel(
        name, tuple(rows), terms, vocabulary * hidden if tied else 0, longest=longest
    )


def iter_tables(vocabulary: int, hidden: int, *, tied: bool) -> Rows:
    """Yield the token embedding, and the head's own matrix where it is not tied."""
    yield ParameterTensor("embed_tokens.weight", (vocabulary, hidden), "embedding")
    if not tied:
        yield from iter_linear_parameters("lm_head", vocabulary, hidden, False, "head")


def build_phi3(fields: ConfigJsonReader) -> CountedModel:
    """Return Phi-3 and Phi-4, whose queries, keys and values are one matrix, and gate and up
    another.
    """
    return build_decoder(fields)


def build_cohere(fields: ConfigJsonReader) -> CountedModel:
    """Return Command R: one norm for parallel branches, and in Command R+ norms of each head's
    queries and keys.
    """
    norm = "per_head" if fields.read_bool("use_qk_norm") else "none"
    bias = fields.read_bool("attention_bias")
    return build_decoder(fields, norms=("input_layernorm",), attention_bias=bias, qk_norm=norm)


def build_ministral(fields: ConfigJsonReader) -> CountedModel:
    """Return Ministral 3."""
    return build_decoder(fields)


def build_mt5(fields: ConfigJsonReader) -> CountedModel:
    """Return mT5, whose head transformers ties whatever `tie_word_embeddings` says."""
    hidden, heads, width = (read_size(fields, name) for name in ("d_model", "num_heads", "d_kv"))
    encoder = read_size(fields, "num_layers")
    decoder = fields.read_optional_int("num_decoder_layers") or encoder
    gated = fields.read_str("feed_forward_proj").startswith("gated-")
    wide, buckets = read_size(fields, "d_ff"), read_size(fields, "relative_attention_num_buckets")
    fields.ignore_keys("tie_word_embeddings")
    rows = [
        ParameterTensor("shared.weight", (read_size(fields, "vocab_size"), hidden), "embedding")
    ]
    for stack, layers in (("encoder", encoder), ("decoder", decoder)):
        own: Component = "attention"
        rows.append(
            ParameterTensor(f"{stack}.relative_attention_bias.weight", (buckets, heads), own)
        )
        parts = ("attention",) if stack == "encoder" else ("attention", "cross_attention")
        tokens = "source" if stack == "encoder" else "token"
        block: list[ParameterTensor] = []
        for part in parts:
            inputs = {"q": tokens, "k": tokens, "v": tokens}
            if part == "cross_attention":
                inputs |= {"k": "source", "v": "source"}
            for letter, kind in inputs.items():
                name = f"{stack}.{{i}}.{part}.{letter}"
                block += iter_linear_parameters(name, heads * width, hidden, False, own, kind)  # type: ignore[arg-type]
            name = f"{stack}.{{i}}.{part}.o"
            block += iter_linear_parameters(name, hidden, heads * width, False, own, tokens)  # type: ignore[arg-type]
            block += iter_norm(f"{stack}.{{i}}.{part}.layer_norm", hidden)
        name = f"{stack}.{{i}}.feed_forward"
        block += iter_feed_forward(name, hidden, wide, gated=gated, input_kind=tokens)  # type: ignore[arg-type]
        block += iter_norm(f"{name}.layer_norm", hidden)
        rows += [*place_rows(block, range(layers)), *iter_norm(f"{stack}.final_layer_norm", hidden)]
    products = 2 * heads * width
    terms = (
        AttentionTerm(encoder, products, "source"),
        AttentionTerm(decoder, products),
        AttentionTerm(decoder, products, "cross"),
    )
    return CountedModel("mt5", tuple(rows), terms, rows[0].num_elements, is_encoder_decoder=True)
