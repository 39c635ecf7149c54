"""Exact parameter counts: in total, by component and layer, active per token, and what the textbook rules make of them.

Counts are integers of the tensors that are built; tied weights count once, buffers not at all.
"""

from dataclasses import dataclass

from llmsys.config.model import ModelConfig
from llmsys.estimate.tensors import TensorRow, model_tensors


@dataclass(frozen=True)
class ActiveParameters:
    """Parameters that one token meets, in the three ways in which papers count them.

    `all` counts everything but the routed experts not chosen (Mixtral's 12.9B). `without_input_embedding` leaves out
    the look-up table, unless it is tied and so works as the head (gpt-oss-20b's 3.61B, DeepSeek-V2-Lite's 2.4B).
    `without_embeddings` leaves out the head too (Moonlight's 2.24B).
    """

    all: int
    without_input_embedding: int
    without_embeddings: int


@dataclass(frozen=True)
class TextbookRule:
    """An approximation of the non-embedding parameters, and its relative error (negative: too low)."""

    rule: str
    value: int
    error: float


@dataclass(frozen=True)
class Parameters:
    """The counts of one model. `per_layer` has the keys dense and moe as far as such layers exist."""

    total: int
    non_embedding: int
    active: ActiveParameters
    by_component: dict[str, int]
    per_layer: dict[str, int]
    textbook: tuple[TextbookRule, ...]


def count_parameters(model: ModelConfig) -> Parameters:
    """Everything there is to count about this model's parameters."""
    rows = model_tensors(model)
    by_component: dict[str, int] = {}
    for row in rows:
        by_component[row.component] = by_component.get(row.component, 0) + row.count
    total = sum(by_component.values())
    embedding, head = by_component["embedding"], by_component.get("head", 0)
    non_embedding = total - embedding - head
    return Parameters(
        total=total,
        non_embedding=non_embedding,
        active=_active(model, rows),
        by_component=by_component,
        per_layer=_per_layer(model, rows),
        textbook=_textbook(model, non_embedding),
    )


def active_count(model: ModelConfig, row: TensorRow) -> int:
    """Elements of a row that one token meets: all, or of routed experts the chosen ones."""
    if row.component != "experts" or model.moe is None:
        return row.count
    return row.count // model.moe.num_experts * model.moe.num_experts_per_tok


def _active(model: ModelConfig, rows: list[TensorRow]) -> ActiveParameters:
    everything = sum(active_count(model, row) for row in rows)
    tables = {row.component: row.count for row in rows if row.component in ("embedding", "head")}
    input_only = 0 if model.tie_word_embeddings else tables["embedding"]
    return ActiveParameters(everything, everything - input_only, everything - sum(tables.values()))


def _per_layer(model: ModelConfig, rows: list[TensorRow]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        if row.layers is not None:
            kind = "dense" if row.layers.start < model.num_dense_layers else "moe"
            counts[kind] = counts.get(kind, 0) + row.each
    return counts


def _textbook(model: ModelConfig, non_embedding: int) -> tuple[TextbookRule, ...]:
    """Kaplan 2020, table 1: N = 2·d·L·(2·d_attn + d_ff), which is 12·L·d² for d_attn = d and d_ff = 4d.

    Both assume a two-matrix feed-forward and full key-value heads; SwiGLU and experts are outside what they know.
    """
    hidden, layers = model.hidden_size, model.num_hidden_layers
    attention = model.num_attention_heads * model.head_dim
    width = model.intermediate_size or (model.moe.moe_intermediate_size if model.moe else 0)
    values = {
        "12·L·d²": 12 * layers * hidden**2,
        "2·d·L·(2·d_attn + d_ff)": 2 * hidden * layers * (2 * attention + width),
    }
    return tuple(TextbookRule(rule, value, value / non_embedding - 1) for rule, value in values.items())
