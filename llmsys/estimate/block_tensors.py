"""The parameter tensors of one block: norms, attention of either kind, and a dense or mixture feed-forward.

Blocks that differ in windows or rotation only have the same tensors, so a few rows say a whole stack.
"""

from collections.abc import Iterator
from dataclasses import replace

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.feed_forward import FeedForwardConfig, list_projection_names
from llmsys.config.model import ModelConfig
from llmsys.config.moe import MoeConfig
from llmsys.estimate.parameter_tensor import Component, Input, ParameterTensor

Rows = Iterator[ParameterTensor]


def iter_block_tensors(model: ModelConfig, place: str, layers: tuple[int, ...]) -> Rows:
    """The rows of the blocks numbered `layers`, which are all dense or all have experts; `place` is their name."""
    parts = [*_iter_branch_tensors(model, "attention", _iter_attention_tensors(model))]
    if model.family == "encoder_decoder":
        parts += _iter_branch_tensors(model, "cross_attention", _iter_cross_attention_tensors(model))
    parts += _iter_branch_tensors(model, "feed_forward", _iter_feed_forward_tensors(model, layers[0]))
    for row in parts:
        yield replace(row, name=f"{place}.{row.name}", layers=layers)


def iter_norm_tensors(model: ModelConfig, name: str, width: int | None = None) -> Rows:
    """A norm of the model's kind, over hidden_size channels unless `width` says otherwise."""
    shape = (model.hidden_size if width is None else width,)
    yield ParameterTensor(f"{name}.weight", shape, "norms")
    if model.norm.kind == "layernorm" and model.norm.bias:
        yield ParameterTensor(f"{name}.bias", shape, "norms")


def _iter_branch_tensors(model: ModelConfig, name: str, rows: Rows) -> Rows:
    """One branch of the residual stream with the norms that stand around it."""
    residual = model.residual
    shared = residual.kind == "parallel" and residual.norms == 1 and name == "feed_forward"
    if residual.kind != "output" and not shared:
        yield from iter_norm_tensors(model, f"{name}_norm")
    yield from rows
    if residual.kind in ("sandwich", "output"):
        yield from iter_norm_tensors(model, f"{name}_output_norm")


def _iter_linear_tensors(
    name: str, outputs: int, inputs: int, bias: bool, component: Component, reads: Input = "token"
) -> Rows:
    yield ParameterTensor(f"{name}.weight", (outputs, inputs), component, input=reads)
    if bias:
        yield ParameterTensor(f"{name}.bias", (outputs,), component)


def _iter_attention_tensors(model: ModelConfig) -> Rows:
    attention = model.attention
    if attention.kind == "latent":
        yield from _iter_latent_tensors(model, attention)
        return
    yield from _iter_projection_tensors(model, attention, "attention", keys_read="token")
    if attention.sinks:
        yield ParameterTensor("attention.sinks", (model.num_attention_heads,), "attention")
    yield from _iter_transformer_xl_tensors(model)


def _iter_cross_attention_tensors(model: ModelConfig) -> Rows:
    """Keys and values come from the encoder. Sinks and latents belong to positions of one sequence."""
    attention = model.attention if model.attention.kind == "multi_head" else MultiHeadAttentionConfig()
    yield from _iter_projection_tensors(model, attention, "cross_attention", keys_read="source")


def _iter_projection_tensors(
    model: ModelConfig, attention: MultiHeadAttentionConfig, place: str, keys_read: Input
) -> Rows:
    hidden, bias = model.hidden_size, attention.qkv_bias
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_key_value_heads * model.head_dim
    yield from _iter_linear_tensors(f"{place}.q_proj", queries, hidden, bias, "attention")
    yield from _iter_linear_tensors(f"{place}.k_proj", keys, hidden, bias, "attention", keys_read)
    yield from _iter_linear_tensors(f"{place}.v_proj", keys, hidden, bias, "attention", keys_read)
    yield from _iter_linear_tensors(f"{place}.o_proj", hidden, queries, attention.output_bias, "attention")
    if attention.qk_norm != "none":
        full = attention.qk_norm == "full"
        yield from iter_norm_tensors(model, f"{place}.q_norm", queries if full else model.head_dim)
        yield from iter_norm_tensors(model, f"{place}.k_norm", keys if full else model.head_dim)


def _iter_latent_tensors(model: ModelConfig, latent: LatentAttentionConfig) -> Rows:
    """MLA: the maps down into the latents, their norms, and the maps up (DeepSeek-V2, 2.1)."""
    heads, hidden, bias = model.num_attention_heads, model.hidden_size, latent.bias
    rotated, rank = latent.qk_rope_head_dim, latent.kv_lora_rank
    queries = heads * (latent.qk_nope_head_dim + rotated)
    if latent.q_lora_rank is None:
        yield from _iter_linear_tensors("attention.q_proj", queries, hidden, False, "attention")
    else:
        yield from _iter_linear_tensors("attention.q_a_proj", latent.q_lora_rank, hidden, bias, "attention")
        yield ParameterTensor("attention.q_a_norm.weight", (latent.q_lora_rank,), "norms")
        yield from _iter_linear_tensors("attention.q_b_proj", queries, latent.q_lora_rank, False, "attention")
    yield from _iter_linear_tensors("attention.kv_a_proj", rank + rotated, hidden, bias, "attention")
    yield ParameterTensor("attention.kv_a_norm.weight", (rank,), "norms")
    yield from _iter_linear_tensors(
        "attention.kv_b_proj", heads * (latent.qk_nope_head_dim + latent.v_head_dim), rank, False, "attention"
    )
    yield from _iter_linear_tensors("attention.o_proj", hidden, heads * latent.v_head_dim, bias, "attention")


def _iter_transformer_xl_tensors(model: ModelConfig) -> Rows:
    """The map of the distances' sinusoids, and the vectors that stand in for queries (Dai 2019, 3.3)."""
    position = model.position
    if position.kind != "transformer_xl":
        return
    vectors = (model.num_attention_heads, model.head_dim)
    yield ParameterTensor(
        "attention.position_proj.weight", (vectors[0] * vectors[1], model.hidden_size), "attention", input="distance"
    )
    if position.biases:
        yield ParameterTensor("attention.content_bias", vectors, "positions")
        yield ParameterTensor("attention.position_bias", vectors, "positions")
    if position.segments:
        yield ParameterTensor("attention.segment_bias", vectors, "positions")
        yield ParameterTensor("attention.segment_embed", (position.segments, *vectors), "positions")


def _iter_feed_forward_tensors(model: ModelConfig, layer: int) -> Rows:
    if model.moe is not None and model.is_moe_layer(layer):
        yield from _iter_moe_tensors(model.moe, model.hidden_size)
    else:
        yield from _iter_dense_tensors(model.feed_forward, "feed_forward", model.hidden_size, model.intermediate_size)


def _iter_dense_tensors(
    config: FeedForwardConfig, place: str, hidden: int, width: int, component: Component = "feed_forward"
) -> Rows:
    for one in list_projection_names(config):
        yield from _iter_linear_tensors(
            f"{place}.{one}_proj", *_get_linear_shape(one, hidden, width), config.bias, component
        )


def _iter_moe_tensors(moe: MoeConfig, hidden: int) -> Rows:
    experts, width, place = moe.num_experts, moe.moe_intermediate_size, "feed_forward"
    yield from _iter_linear_tensors(f"{place}.router", experts, hidden, moe.router_bias, "router")
    maps = list_projection_names(moe.expert)
    for one in maps:  # stacked experts are (experts, in, out), the transpose of a linear map
        shape = (experts, *reversed(_get_linear_shape(one, hidden, width)))
        yield ParameterTensor(f"{place}.experts.{one}_proj", shape, "experts", input="visit")
    for one in maps if moe.expert.bias else ():
        yield ParameterTensor(
            f"{place}.experts.{one}_bias", (experts, _get_linear_shape(one, hidden, width)[0]), "experts"
        )
    if moe.shared_expert_size:
        yield from _iter_dense_tensors(moe.expert, f"{place}.shared", hidden, moe.shared_expert_size, "shared_experts")
    if moe.shared_gate:
        yield from _iter_linear_tensors(f"{place}.shared_gate", 1, hidden, False, "shared_experts")


def _get_linear_shape(which: str, hidden: int, width: int) -> tuple[int, int]:
    """(out, in) of one map of a feed-forward layer."""
    return (hidden, width) if which == "down" else (width, hidden)
