"""The parameter tensors of one block: norms, attention of either kind, and a dense or mixture feed-forward.

Blocks that differ in windows or rotation only have the same tensors, so a few rows say a whole stack.
"""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.attention import Latent, MultiHead
from llmsys.config.feed_forward import FeedForwardConfig, maps_of
from llmsys.config.model import ModelConfig
from llmsys.config.moe import MoeConfig
from llmsys.estimate.rows import Component, Input, TensorRow

Rows = Iterator[TensorRow]


def block_tensors(model: ModelConfig, place: str, layers: tuple[int, ...]) -> Rows:
    """The rows of the blocks numbered `layers`, which are all dense or all have experts; `place` is their name."""
    parts = [*_branch(model, "attention", _attention(model))]
    if model.family == "encoder_decoder":
        parts += _branch(model, "cross_attention", _cross_attention(model))
    parts += _branch(model, "feed_forward", _feed_forward(model, layers[0]))
    for row in parts:
        yield replace(row, name=f"{place}.{row.name}", layers=layers)


def norm_tensors(model: ModelConfig, name: str, width: int | None = None) -> Rows:
    """A norm of the model's kind, over hidden_size channels unless `width` says otherwise."""
    shape = (model.hidden_size if width is None else width,)
    yield TensorRow(f"{name}.weight", shape, "norms")
    if model.norm.kind == "layernorm" and model.norm.bias:
        yield TensorRow(f"{name}.bias", shape, "norms")


def _branch(model: ModelConfig, name: str, rows: Rows) -> Rows:
    """One branch of the residual stream with the norms that stand around it."""
    residual = model.residual
    shared = residual.kind == "parallel" and residual.norms == 1 and name == "feed_forward"
    if residual.kind != "output" and not shared:
        yield from norm_tensors(model, f"{name}_norm")
    yield from rows
    if residual.kind in ("sandwich", "output"):
        yield from norm_tensors(model, f"{name}_output_norm")


def _linear(name: str, outputs: int, inputs: int, bias: bool, component: Component, reads: Input = "token") -> Rows:
    yield TensorRow(f"{name}.weight", (outputs, inputs), component, input=reads)
    if bias:
        yield TensorRow(f"{name}.bias", (outputs,), component)


def _attention(model: ModelConfig) -> Rows:
    attention = model.attention
    if attention.kind == "latent":
        yield from _latent(model, attention)
        return
    yield from _projections(model, attention, "attention", keys_read="token")
    if attention.sinks:
        yield TensorRow("attention.sinks", (model.num_attention_heads,), "attention")
    yield from _transformer_xl(model)


def _cross_attention(model: ModelConfig) -> Rows:
    """Keys and values come from the encoder. Sinks and latents belong to positions of one sequence."""
    attention = model.attention if model.attention.kind == "multi_head" else MultiHead()
    yield from _projections(model, attention, "cross_attention", keys_read="source")


def _projections(model: ModelConfig, attention: MultiHead, place: str, keys_read: Input) -> Rows:
    hidden, bias = model.hidden_size, attention.qkv_bias
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    yield from _linear(f"{place}.q_proj", queries, hidden, bias, "attention")
    yield from _linear(f"{place}.k_proj", keys, hidden, bias, "attention", keys_read)
    yield from _linear(f"{place}.v_proj", keys, hidden, bias, "attention", keys_read)
    yield from _linear(f"{place}.o_proj", hidden, queries, attention.output_bias, "attention")
    if attention.qk_norm != "none":
        full = attention.qk_norm == "full"
        yield from norm_tensors(model, f"{place}.q_norm", queries if full else model.head_dim)
        yield from norm_tensors(model, f"{place}.k_norm", keys if full else model.head_dim)


def _latent(model: ModelConfig, latent: Latent) -> Rows:
    """MLA: the maps down into the latents, their norms, and the maps up (DeepSeek-V2, 2.1)."""
    heads, hidden, bias = model.num_attention_heads, model.hidden_size, latent.bias
    rotated, rank = latent.qk_rope_head_dim, latent.kv_lora_rank
    queries = heads * (latent.qk_nope_head_dim + rotated)
    if latent.q_lora_rank is None:
        yield from _linear("attention.q_proj", queries, hidden, False, "attention")
    else:
        yield from _linear("attention.q_a_proj", latent.q_lora_rank, hidden, bias, "attention")
        yield TensorRow("attention.q_a_norm.weight", (latent.q_lora_rank,), "norms")
        yield from _linear("attention.q_b_proj", queries, latent.q_lora_rank, False, "attention")
    yield from _linear("attention.kv_a_proj", rank + rotated, hidden, bias, "attention")
    yield TensorRow("attention.kv_a_norm.weight", (rank,), "norms")
    yield from _linear(
        "attention.kv_b_proj", heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank, False, "attention"
    )
    yield from _linear("attention.o_proj", hidden, heads * latent.v_head_dim, bias, "attention")


def _transformer_xl(model: ModelConfig) -> Rows:
    """The map of the distances' sinusoids, and the vectors that stand in for queries (Dai 2019, 3.3)."""
    position = model.position
    if position.kind != "transformer_xl":
        return
    vectors = (model.num_attention_heads, model.head_dim)
    yield TensorRow(
        "attention.position_proj.weight", (vectors[0] * vectors[1], model.hidden_size), "attention", input="distance"
    )
    if position.biases:
        yield TensorRow("attention.content_bias", vectors, "positions")
        yield TensorRow("attention.position_bias", vectors, "positions")
    if position.segments:
        yield TensorRow("attention.segment_bias", vectors, "positions")
        yield TensorRow("attention.segment_embed", (position.segments, *vectors), "positions")


def _feed_forward(model: ModelConfig, layer: int) -> Rows:
    if model.moe is not None and model.is_moe_layer(layer):
        yield from _mixture(model.moe, model.hidden_size)
    else:
        yield from _dense(model.feed_forward, "feed_forward", model.hidden_size, model.intermediate_size)


def _dense(
    config: FeedForwardConfig, place: str, hidden: int, width: int, component: Component = "feed_forward"
) -> Rows:
    for one in maps_of(config):
        yield from _linear(f"{place}.{one}_proj", *_shape(one, hidden, width), config.bias, component)


def _mixture(moe: MoeConfig, hidden: int) -> Rows:
    experts, width, place = moe.num_experts, moe.moe_intermediate_size, "feed_forward"
    yield from _linear(f"{place}.router", experts, hidden, moe.router_bias, "router")
    maps = maps_of(moe.expert)
    for one in maps:  # stacked experts are (experts, in, out), the transpose of a linear map
        shape = (experts, *reversed(_shape(one, hidden, width)))
        yield TensorRow(f"{place}.experts.{one}_proj", shape, "experts", input="visit")
    for one in maps if moe.expert.bias else ():
        yield TensorRow(f"{place}.experts.{one}_bias", (experts, _shape(one, hidden, width)[0]), "experts")
    if moe.shared_width:
        yield from _dense(moe.expert, f"{place}.shared", hidden, moe.shared_width, "shared_experts")
    if moe.shared_gate:
        yield from _linear(f"{place}.shared_gate", 1, hidden, False, "shared_experts")


def _shape(which: str, hidden: int, width: int) -> tuple[int, int]:
    """(out, in) of one map of a feed-forward layer."""
    return (hidden, width) if which == "down" else (width, hidden)
