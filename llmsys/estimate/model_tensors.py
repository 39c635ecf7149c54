"""List every parameter tensor of a model by name and shape, without building it, and count
parameters.

Counts are integers of the tensors that are built; tied weights count once, buffers not at all.

The kinds in llmsys/config list their own tensors; this file assembles them in the order of the
module.

Invariants:
- Names and shapes are those of the Transformer (a test compares them with the built module).
- Tied weights come once; buffers never come (balancing bias, fixed logits bias, rotation tables,
  sinusoids).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from pydantic import Field

from llmsys.config.feed_forward import iter_feed_forward_parameters
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import Input, ParameterTensor
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig
from llmsys.config.section import ResultSection
from llmsys.estimate.python_blocks import iter_measured_parameters

Rows = Iterator[ParameterTensor]


def list_model_tensors(model: ModelConfig) -> list[ParameterTensor]:
    """Return all parameters of the model, tied ones once.

    Args:
        model: the architecture.

    Returns:
        Rows, each of one tensor or of the same tensor of several blocks.
    """
    return list(_list_tensors(model))


@lru_cache(maxsize=64)  # a plan asks for those of one model thousands of times
def _list_tensors(model: ModelConfig) -> tuple[ParameterTensor, ...]:
    rows = [ParameterTensor("embed.weight", (model.vocab_size, model.hidden_size), "embedding")]
    if model.patches is not None:
        rows = list(model.patches.iter_parameters(model.hidden_size))
    if (source := model.embedding.source_vocab_size) is not None:
        rows.append(
            ParameterTensor("source_embed.weight", (source, model.hidden_size), "embedding")
        )
    if (bigrams := model.embedding.bigram_rows) is not None:
        rows.append(
            ParameterTensor("bigram_embed.weight", (bigrams, model.hidden_size), "embedding")
        )
    if model.family == "encoder_decoder":
        rows += (_to_encoder_tensor(row) for row in _iter_stack_tensors(model.encoder_model))
    rows += _iter_stack_tensors(model)
    rows += model.head.iter_parameters(model)
    rows += _iter_prediction_tensors(model)
    return tuple(rows)


def is_head_tied(model: ModelConfig) -> bool:
    """Return whether the embedding matrix is the head's matrix too."""
    return model.tie_word_embeddings and model.head.has_logits


def needs_embedding_copy(model: ModelConfig) -> bool:
    """Return whether the last stage needs the token embedding too: for a tied head, or to predict
    further tokens.

    Args:
        model: the architecture.

    Returns:
        True where first and last stage have a copy each.
    """
    return is_head_tied(model) or model.multi_token_prediction is not None


def _to_encoder_tensor(row: ParameterTensor) -> ParameterTensor:
    inputs: dict[Input | None, Input] = {"token": "source", "distance": "encoder_distance"}
    return replace(row, name=f"encoder.{row.name}", input=inputs.get(row.input))


def _iter_stack_tensors(model: ModelConfig) -> Rows:
    """Yield one stack of blocks, with the layers before and after it."""
    yield from model.position.iter_embedding_parameters(model)
    # The encoder of an encoder-decoder has the decoder's head, which is no encoder's, and no token
    # types.
    if (
        model.embedding.token_types
        and model.family == "encoder"
        and model.family in model.head.families
    ):
        yield ParameterTensor(
            "token_types.weight", (model.embedding.token_types, model.hidden_size), "positions"
        )
    yield from model.position.iter_stack_parameters(model)
    yield from model.attention.iter_stack_parameters(model)
    if model.embedding.norm:
        yield from model.norm.iter_parameters("embedding_norm", model.hidden_size)
    if model.rnn is not None:
        yield from model.rnn.iter_parameters(model)
        return
    steps = model.num_hidden_layers // model.num_blocks
    kinds: dict[tuple[bool, ...], list[int]] = {}
    for layer in range(model.num_blocks):
        experts, linear = model.is_moe_layer(layer), model.is_linear_layer(layer)
        has_table = layer in model.embedding.value_layers
        rest = (has_table, model.has_attention(layer), model.has_feed_forward(layer))
        kinds.setdefault((experts, linear, *rest), []).append(layer)
    for _, layers in sorted(kinds.items()):
        yield from (
            replace(row, steps=steps * row.steps)
            for row in _iter_block_tensors(model, "blocks.{i}", tuple(layers))
        )
    if model.u_shaped_skips:
        yield ParameterTensor("skip_scales", (model.num_hidden_layers // 2,), "norms")
    if model.recurrence is not None:
        yield from (
            replace(row, steps=steps * row.steps) for row in model.recurrence.iter_parameters(model)
        )
    if model.residual.has_final_norm:
        yield from model.norm.iter_parameters("norm", model.hidden_size)


def _iter_block_tensors(model: ModelConfig, name: str, layers: tuple[int, ...]) -> Rows:
    """Yield the rows of blocks with the same sub-layers; `name` is the prefix of their
    parameters.

    Blocks that differ in windows or rotation only have the same tensors, so a few rows describe a
    stack.
    """
    first = layers[0]
    rows: list[ParameterTensor] = []
    if model.list_mixers(first):
        rows += _iter_branch_tensors(model, "attention", first, _iter_mixer_tensors(model, first))
    if model.family == "encoder_decoder":
        cross = model.attention.cross_attention.iter_projection_parameters(
            model, "cross_attention", keys_input="source"
        )
        rows += _iter_branch_tensors(model, "cross_attention", first, cross)
    if model.has_feed_forward(first):
        rows += _iter_branch_tensors(
            model, "feed_forward", first, _iter_feed_forward_tensors(model, first)
        )
    for row in rows:
        yield replace(row, name=f"{name}.{row.name}", layers=layers)


def _iter_mixer_tensors(model: ModelConfig, layer: int) -> Rows:
    has_attention = model.has_attention(layer)
    if has_attention:
        yield from _iter_attention_tensors(model)
    if layer in model.embedding.value_layers:
        yield from model.embedding.iter_value_parameters(model)
    if model.linear_attention is not None and model.is_linear_layer(layer):
        prefix = "linear_" if has_attention else ""
        for row in model.linear_attention.iter_parameters(model):
            yield replace(row, name=f"{prefix}{row.name}")


def _iter_branch_tensors(model: ModelConfig, name: str, layer: int, rows: Rows) -> Rows:
    """Yield one branch of the residual stream with the norms around it."""
    residual = model.get_residual(layer)
    is_shared = residual.shares_input_norm and name == "feed_forward"
    if (residual.normalizes_input or residual.normalizes_sum) and not is_shared:
        yield from model.norm.iter_parameters(f"{name}_norm", model.hidden_size)
    yield from rows
    if residual.normalizes_output:
        yield from model.norm.iter_parameters(f"{name}_output_norm", model.hidden_size)


def _iter_attention_tensors(model: ModelConfig) -> Rows:
    if isinstance(model.attention, PythonAttentionConfig):
        yield from iter_measured_parameters(model.attention, model, "attention", "attention")
    for row in model.attention.iter_parameters(model):
        # Keys and values of XLNet are those of its first stream.
        is_content = model.head.kind == "permutation" and row.name.startswith(
            ("attention.k_proj", "attention.v_proj")
        )
        yield replace(row, input="source") if is_content and row.input is not None else row
    yield from model.position.iter_attention_parameters(model)


def _iter_feed_forward_tensors(model: ModelConfig, layer: int) -> Rows:
    if model.moe is not None and model.is_moe_layer(layer):
        return model.moe.iter_parameters("feed_forward", model.hidden_size)
    if isinstance(model.feed_forward, PythonFeedForwardConfig):
        name = "feed_forward"
        return iter_measured_parameters(model.feed_forward, model, name, "feed_forward")
    return iter_feed_forward_parameters(
        model.feed_forward, "feed_forward", model.hidden_size, model.intermediate_size
    )


def _iter_prediction_tensors(model: ModelConfig) -> Rows:
    """Yield DeepSeek-V3's modules: embedding and head are the model's, the block is one more
    like the last.
    """
    if model.multi_token_prediction is None:
        return
    modules, hidden = tuple(range(model.multi_token_prediction.depth)), model.hidden_size
    last = model.num_hidden_layers - 1
    rows = [
        *model.norm.iter_parameters("embedding_norm", hidden),
        *model.norm.iter_parameters("hidden_norm", hidden),
        ParameterTensor(
            "projection.weight", (hidden, 2 * hidden), "multi_token_prediction", input="token"
        ),
        *_iter_block_tensors(model, "block", (last,)),
        *model.norm.iter_parameters("norm", hidden),
    ]
    for row in rows:
        yield replace(
            row,
            name=f"prediction.{{i}}.{row.name}",
            component="multi_token_prediction",
            layers=modules,
        )


# Tables that are looked up, and what makes logits. Maps of relative positions belong to attention,
# transforms in front of a head to the model. This is how the published non-embedding counts are
# meant (Kaplan 2020; Pythia's table).
EMBEDDING_COMPONENTS = frozenset({"embedding", "positions", "head", "head_bias"})


class ActiveParameters(ResultSection):
    """Parameters that one token uses, in the three usual conventions.

    `all` counts everything but the routed experts not chosen (Mixtral's 12.9B).
    `without_input_embedding` leaves out the token table, unless it is tied and so works as the head
    (gpt-oss-20b's 3.61B, DeepSeek-V2-Lite's 2.4B). `without_embeddings` leaves out the head too,
    and the same as `non_embedding` (Moonlight's 2.24B). Modules for multi-token prediction count
    where the config has them, for a training token meets them; headlines leave them out.
    """

    all: int = Field(description="Every parameter that is used.")
    without_input_embedding: int = Field(description="Without the table of the input tokens.")
    without_embeddings: int = Field(description="Without that table and the head.")


class TextbookRule(ResultSection):
    """A usual formula for the non-embedding parameters, and its error for this model."""

    rule: str = Field(description="The formula.")
    value: int = Field(description="Parameters by it.")
    error: float = Field(description="Relative to the exact count; negative: too low.")


class ComponentCounts(ResultSection):
    """Exact counts of parameters."""

    total: int = Field(description="Parameters, tied ones once.")
    non_embedding: int = Field(description="Without embeddings and an untied head.")
    active: ActiveParameters = Field(description="Parameters that one token uses.")
    by_component: dict[str, int] = Field(description="Parameters by component.")


class ParameterCounts(ComponentCounts):
    """Exact counts of parameters.

    `non_embedding` is the total without token embeddings, tables and vectors of positions and token
    types, the head's own matrix and the bias on the logits. `per_layer` has the keys encoder,
    dense, moe, dense_linear, moe_linear (those of linear attention), dense_hybrid, moe_hybrid (of
    both), dense_values, moe_values (those with value embeddings) and multi_token_prediction as far
    as such layers exist; dense and moe are the decoder's in an encoder-decoder. Layers with one
    sub-layer are attention, linear_attention, hybrid_attention, dense_feed_forward and
    moe_feed_forward.
    """

    per_layer: dict[str, int] = Field(description="Parameters of one layer by its kind.")
    textbook: tuple[TextbookRule, ...] = Field(description="Formulas of textbooks.")
    frozen: int | None = Field(
        None, description="Of Marian: tables that transformers' class has and does not train."
    )


def count_parameters(model: ModelConfig) -> ParameterCounts:
    """Count the parameters of a model: total, active, by component, by layer.

    Args:
        model: architecture; nothing is built.

    Returns:
        Exact counts; tied weights once, no buffers.
    """
    rows = list_model_tensors(model)
    by_component: dict[str, int] = {}
    for row in rows:
        by_component[row.component] = by_component.get(row.component, 0) + row.num_elements
    total = sum(by_component.values())
    non_embedding = total - sum(by_component.get(one, 0) for one in EMBEDDING_COMPONENTS)
    return ParameterCounts(
        total=total,
        non_embedding=non_embedding,
        active=_count_active_parameters(model, rows),
        by_component=by_component,
        per_layer=_count_layer_parameters(model, rows),
        textbook=_apply_textbook_rules(model, non_embedding),
    )


def count_active_elements(model: ModelConfig, row: ParameterTensor) -> int:
    """Elements of a row that one token meets: all, or of routed experts the chosen ones."""
    if not row.is_routed or model.moe is None:
        return row.num_elements
    return int(row.num_elements // model.moe.num_experts * model.moe.visits_per_token)


def _count_active_parameters(model: ModelConfig, rows: list[ParameterTensor]) -> ActiveParameters:
    everything = sum(count_active_elements(model, row) for row in rows)
    tables = sum(row.num_elements for row in rows if row.component in EMBEDDING_COMPONENTS)
    used_as_head = "embed.weight" if is_head_tied(model) else None
    input_only = sum(
        row.num_elements
        for row in rows
        if row.component == "embedding" and row.name != used_as_head
    )
    return ActiveParameters(
        all=everything,
        without_input_embedding=everything - input_only,
        without_embeddings=everything - tables,
    )


def _count_layer_parameters(model: ModelConfig, rows: list[ParameterTensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if row.layers:
            kind = get_layer_kind(model, row)
            counts[kind] = counts.get(kind, 0) + row.elements_per_copy
    return counts


def get_layer_kind(model: ModelConfig, row: ParameterTensor) -> str:
    """Return the kind of layer of a block's row: a key of `ParameterCounts.per_layer`."""
    if row.name.startswith("encoder."):
        return "encoder"
    if row.component == "multi_token_prediction":
        return row.component
    layer = row.layers[0]
    kind = "moe" if model.is_moe_layer(layer) else "dense"
    if layer in model.embedding.value_layers:
        return f"{kind}_values"
    if not model.list_mixers(layer):
        return f"{kind}_feed_forward"
    mixer = "linear" if model.is_linear_layer(layer) else ""
    mixer = "hybrid" if mixer and model.has_attention(layer) else mixer
    if not model.has_feed_forward(layer):
        return f"{mixer}_attention" if mixer else "attention"
    return f"{kind}_{mixer}" if mixer else kind


def _apply_textbook_rules(model: ModelConfig, non_embedding: int) -> tuple[TextbookRule, ...]:
    """Kaplan 2020, table 1: N = 2·d·L·(2·d_attn + d_ff), which is 12·L·d² for d_attn = d and d_ff =
    4d.

    Both assume a two-matrix feed-forward, full key-value heads and no cross-attention; L counts the
    blocks of both stacks. SwiGLU and experts are outside what they know, and recurrent layers have
    no blocks.
    """
    if model.rnn is not None:
        return ()
    hidden, layers = model.hidden_size, model.num_blocks
    if model.family == "encoder_decoder":
        layers += model.encoder_model.num_blocks
    attention = model.num_attention_heads * model.head_dim
    width = model.intermediate_size or (model.moe.moe_intermediate_size if model.moe else 0)
    values = {
        "12·L·d²": 12 * layers * hidden**2,
        "2·d·L·(2·d_attn + d_ff)": 2 * hidden * layers * (2 * attention + width),
    }
    return tuple(
        TextbookRule(rule=rule, value=value, error=value / non_embedding - 1)
        for rule, value in values.items()
    )
