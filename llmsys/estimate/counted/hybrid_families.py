"""State-space models and hybrids: mamba, mamba2, jamba, nemotron_h.

Each `build_` function takes a reader whose defaults are those of transformers' config class.
"""

import math

from llmsys.config.module_tensors import ParameterTensor, iter_linear_parameters
from llmsys.estimate.counted.counted_model import (
    AttentionTerm,
    CountedModel,
    count_scan,
    place_rows,
)
from llmsys.estimate.counted.dense_families import iter_tables
from llmsys.estimate.counted.layer_parts import (
    AttentionSizes,
    DualScanSizes,
    SelectiveScanSizes,
    iter_attention,
    iter_dual_scan,
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
    return CountedModel(
        "mamba", tuple(rows), (), tied, scan=layers * count_scan(inner * state, "selective")
    )


def build_mamba2(fields: ConfigJsonReader) -> CountedModel:
    """Return Mamba-2: a norm and a dual scan in every layer."""
    hidden, layers = read_size(fields, "hidden_size"), read_size(fields, "num_hidden_layers")
    inner, heads = (
        int(fields.read_positive_float("expand") * hidden),
        read_size(fields, "num_heads"),
    )
    if inner != heads * (width := read_size(fields, "head_dim")):
        fields.add_violation(
            "num_heads",
            f"{heads} heads of {width} channels are not expand × hidden_size = {inner}.",
        )
    sizes = DualScanSizes(
        hidden,
        inner,
        heads,
        read_size(fields, "state_size"),
        read_size(fields, "n_groups"),
        read_size(fields, "conv_kernel"),
        fields.read_bool("use_conv_bias"),
        fields.read_bool("use_bias"),
    )
    rows, tied = _read_tables(fields, hidden)
    block = [*iter_norm("layers.{i}.norm", hidden), *iter_dual_scan("layers.{i}.mixer", sizes)]
    rows += [*place_rows(block, range(layers)), *iter_norm("norm_f", hidden)]
    return CountedModel(
        "mamba2", tuple(rows), (), tied, scan=layers * count_scan(inner * sizes.state, "dual")
    )


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
    work = len(mamba) * count_scan(inner * state, "selective")
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


# Letters of hybrid_override_pattern, and older names of the same kinds.
_NEMOTRON_KINDS = {
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}


def build_nemotron_h(fields: ConfigJsonReader) -> CountedModel:
    """Return Nemotron-H: each layer is a norm and one of Mamba-2, attention, a feed-forward, or
    experts.
    """
    hidden = read_size(fields, "hidden_size")
    kinds = _read_nemotron_kinds(fields)
    heads, pairs, width = read_heads(fields, hidden)
    attention = AttentionSizes(hidden, heads, pairs, width)
    mamba_heads, state = read_size(fields, "mamba_num_heads"), read_size(fields, "ssm_state_size")
    scan = DualScanSizes(
        hidden,
        mamba_heads * read_size(fields, "mamba_head_dim"),
        mamba_heads,
        state,
        read_size(fields, "n_groups", "mamba_n_groups"),
        read_size(fields, "conv_kernel", "mamba_d_conv"),
        fields.read_bool("use_conv_bias", "mamba_conv_bias"),
        fields.read_bool("use_bias"),
    )
    mlp_bias = fields.read_bool("mlp_bias")
    dense = iter_feed_forward(
        "layers.{i}.mixer",
        hidden,
        read_size(fields, "intermediate_size"),
        gated=False,
        bias=mlp_bias,
    )
    experts = read_size(fields, "n_routed_experts", "num_local_experts")
    parts = {
        "linear_attention": iter_dual_scan("layers.{i}.mixer", scan),
        "full_attention": iter_attention("layers.{i}.mixer", attention),
        "mlp": dense,
        "moe": _build_nemotron_mixture(fields, hidden, experts, mlp_bias),
    }
    fields.ignore_keys("tie_word_embeddings")  # transformers' class ties nothing
    rows = list(iter_tables(read_size(fields, "vocab_size"), hidden, tied=False))
    for kind, block in parts.items():
        rows += place_rows(block, [i for i, one in enumerate(kinds) if one == kind])
    rows += [
        *place_rows(iter_norm("layers.{i}.norm", hidden), range(len(kinds))),
        *iter_norm("norm_f", hidden),
    ]
    terms = (AttentionTerm(kinds.count("full_attention"), attention.products),)
    work = kinds.count("linear_attention") * count_scan(scan.inner * state, "dual")
    visits, longest = (
        read_size(fields, "num_experts_per_tok"),
        fields.read_optional_int("max_position_embeddings"),
    )
    return CountedModel("nemotron_h", tuple(rows), terms, 0, experts, visits, work, longest)


def _build_nemotron_mixture(
    fields: ConfigJsonReader, hidden: int, experts: int, bias: bool
) -> list[ParameterTensor]:
    shared, wide = (
        read_size(fields, f"moe_{name}intermediate_size") for name in ("shared_expert_", "")
    )
    latent = fields.read_optional_int("moe_latent_size")
    rows = [
        *iter_router("layers.{i}.mixer", experts, hidden),
        *iter_experts("layers.{i}.mixer", experts, latent or hidden, wide, gated=False),
        *iter_feed_forward(
            "layers.{i}.mixer.shared_experts",
            hidden,
            shared,
            gated=False,
            bias=bias,
            component="shared_experts",
        ),
    ]
    if latent is not None:
        rows += iter_linear_parameters(
            "layers.{i}.mixer.fc1_latent_proj", latent, hidden, bias, "experts"
        )
        rows += iter_linear_parameters(
            "layers.{i}.mixer.fc2_latent_proj", hidden, latent, bias, "experts"
        )
    return rows


def _read_nemotron_kinds(fields: ConfigJsonReader) -> list[str]:
    pattern = fields.values.get("hybrid_override_pattern")
    fields.ignore_keys("hybrid_override_pattern", "num_hidden_layers")
    words = fields.read_str_list("layers_block_type") or fields.read_str_list("layer_types")
    words = words or list(pattern if isinstance(pattern, str) else "ME*-")
    kinds = [_NEMOTRON_KINDS.get(word, word) for word in words]
    _check_kinds(
        fields,
        "layers_block_type",
        kinds,
        ("linear_attention", "full_attention", "moe", "mlp"),
        len(kinds),
    )
    return kinds


def _check_kinds(
    fields: ConfigJsonReader, name: str, kinds: list[str], legal: tuple[str, ...], layers: int
) -> None:
    if len(kinds) != layers:
        fields.add_violation(
            name, f"has {len(kinds)} entries for {layers} layers. Give one for each."
        )
    for unknown in sorted({*kinds} - {*legal}):
        fields.add_violation(name, f"{unknown!r} is not supported. Use {' or '.join(legal)}.")
