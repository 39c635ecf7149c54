"""State-space models and hybrids: mamba and jamba.

Each `build_` function takes a reader whose defaults are those of transformers' config class.
"""

import math

from llmsys.config.module_tensors import ParameterTensor
from llmsys.estimate.counted.counted_model import (
    AttentionTerm,
    CountedModel,
    count_scan,
    place_rows,
)
from llmsys.estimate.counted.dense_families import iter_tables
from llmsys.estimate.counted.layer_parts import (
    AttentionSizes,
    SelectiveScanSizes,
    iter_attention,
    iter_experts,
    iter_feed_forward,
    iter_norm,
    iter_router,
    iter_selective_scan,
)
from llmsys.estimate.counted.sizes import read_heads, read_size
from llmsys.hugging_face.config_json import ConfigJsonReader


def _read_rank(fields: ConfigJsonReader, name: str, hidden: int) -> int:
    if fields.values.get(name, "auto") == "auto":
        fields.ignore_keys(name)
        return math.ceil(hidden / 16)
    return read_size(fields, name)


def _read_tables(fields: ConfigJsonReader, hidden: int) -> tuple[list[ParameterTensor], int]:
    """Return embedding and head, and the elements of a tied head."""
    vocabulary, tied = read_size(fields, "vocab_size"), fields.read_bool("tie_word_embeddings")
    return list(iter_tables(vocabulary, hidden, tied=tied)), vocabulary * hidden if tied else 0


def build_mamba(fields: ConfigJsonReader) -> CountedModel:
    """Return Mamba: a norm and a selective scan in every layer."""
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    inner, state = (
        int(fields.read_positive_float("expand") * hidden),
        read_size(fields, "state_size"),
    )
    sizes = SelectiveScanSizes(
        hidden,
        inner,
        state,
        read_size(fields, "conv_kernel"),
        _read_rank(fields, "time_step_rank", hidden),
        fields.read_bool("use_conv_bias"),
        fields.read_bool("use_bias"),
    )
    rows, tied = _read_tables(fields, hidden)
    block = [*iter_norm("layers.{i}.norm", hidden), *iter_selective_scan("layers.{i}.mixer", sizes)]
    rows += [*place_rows(block, range(layers)), *iter_norm("norm_f", hidden)]
    return CountedModel("mamba", tuple(rows), (), tied, scan=layers * count_scan(inner * state))


def build_jamba(fields: ConfigJsonReader) -> CountedModel:
    """Return Jamba: one attention layer in each period, Mamba in the others, experts in every
    second layer.
    """
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    heads, pairs, width = read_heads(fields, hidden)
    inner, state = read_size(fields, "mamba_expand") * hidden, read_size(fields, "mamba_d_state")
    scan = SelectiveScanSizes(
        hidden,
        inner,
        state,
        read_size(fields, "mamba_d_conv"),
        _read_rank(fields, "mamba_dt_rank", hidden),
        fields.read_bool("mamba_conv_bias"),
        fields.read_bool("mamba_proj_bias"),
        norms=True,
    )
    attends = _select_layers(fields, layers, "attn")
    experts, wide = read_size(fields, "num_experts"), read_size(fields, "intermediate_size")
    sparse = [layer for layer in _select_layers(fields, layers, "expert") if experts > 1]
    attention = AttentionSizes(hidden, heads, pairs, width)
    mixture = [
        *iter_router("layers.{i}.feed_forward", experts, hidden),
        *iter_experts("layers.{i}.feed_forward", experts, hidden, wide),
    ]
    rows, tied = _read_tables(fields, hidden)
    norms = [
        row
        for name in ("input", "pre_ff")
        for row in iter_norm(f"layers.{{i}}.{name}_layernorm", hidden)
    ]
    mamba = [layer for layer in range(layers) if layer not in attends]
    rows += [
        *place_rows(iter_attention("layers.{i}.self_attn", attention), attends),
        *place_rows(iter_selective_scan("layers.{i}.mamba", scan), mamba),
        *place_rows(mixture, sparse),
        *place_rows(
            iter_feed_forward("layers.{i}.feed_forward", hidden, wide),
            [i for i in range(layers) if i not in sparse],
        ),
        *place_rows(norms, range(layers)),
        *iter_norm("final_layernorm", hidden),
    ]
    visits = read_size(fields, "num_experts_per_tok")
    terms = (AttentionTerm(len(attends), attention.products),)
    work = len(mamba) * count_scan(inner * state)
    longest = fields.read_optional_int("max_position_embeddings")
    return CountedModel("jamba", tuple(rows), terms, tied, experts, visits, work, longest)


def _select_layers(fields: ConfigJsonReader, layers: int, name: str) -> list[int]:
    """Return the layers at an offset in each period."""
    period, offset = (
        read_size(fields, f"{name}_layer_period"),
        fields.read_int(f"{name}_layer_offset"),
    )
    if not 0 <= offset < period:
        fields.add_violation(
            f"{name}_layer_offset", f"{offset} is not below {name}_layer_period={period}."
        )
    return [layer for layer in range(layers) if layer % period == offset]
