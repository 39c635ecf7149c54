"""The tensors that attention makes for one block: projections, norms of heads, rotations, and the way to its output."""

from collections.abc import Iterator

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.estimate.kept import ActivationShape, SavedTensor
from llmsys.estimate.kept_scores import HeadShape, iter_score_tensors, must_repeat_key_value_heads, choose_attention_kernel


def iter_attention_tensors(model: ModelConfig, layer: int, extent: ActivationShape, *, output_saved: bool) -> Iterator[SavedTensor]:
    """Self-attention of block `layer`. `output_saved`: a norm behind it keeps what it gives."""
    causal, count = model.family != "encoder", model.num_attention_heads
    if model.attention.kind == "latent":
        latent = model.attention
        width = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        heads = HeadShape(count, count, width, latent.v_head_dim, extent.length, causal)
        way = choose_attention_kernel(model, heads, extent, own=True)
        yield from _iter_latent_tensors(count, latent, extent, read=way == "kernel")
    else:
        heads = HeadShape(count, model.num_key_value_heads, model.head_dim, model.head_dim, extent.length, causal)
        way = choose_attention_kernel(model, heads, extent, own=True)
        yield from _iter_projection_tensors(model, model.attention, heads, extent, model.uses_rope(layer), read=way == "kernel")
    yield from iter_score_tensors(model, heads, way, extent)
    yield from iter_output_projection("attention projection", model, extent, output_saved)


def iter_cross_attention_tensors(model: ModelConfig, extent: ActivationShape, *, output_saved: bool) -> Iterator[SavedTensor]:
    """Queries of the target's positions, keys and values of the source's."""
    attention = model.attention if model.attention.kind == "multi_head" else MultiHeadAttentionConfig()
    count, groups, width = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    heads = HeadShape(count, groups, width, width, extent.source, causal=False)
    way = choose_attention_kernel(model, heads, extent, own=False)
    yield from _iter_projection_tensors(model, attention, heads, extent, rotated=False, read=way in ("kernel", "explicit"))
    yield from iter_score_tensors(model, heads, way, extent)
    yield from iter_output_projection("cross-attention projection", model, extent, output_saved)


def iter_output_projection(name: str, model: ModelConfig, extent: ActivationShape, saved: bool) -> Iterator[SavedTensor]:
    """The last product of a branch: all positions, and after the sum over tensor ranks this rank's."""
    if extent.tensor == 1:
        yield SavedTensor(name, extent.compute_residual_bytes(model.hidden_size), "product", saved, is_needed=saved)
        return
    yield SavedTensor(f"{name}, partial", extent.compute_gathered_bytes(model.hidden_size), "product", saved=False, is_needed=False)
    yield SavedTensor(name, extent.compute_residual_bytes(model.hidden_size), "collective", saved, is_needed=saved)


def _iter_projection_tensors(
    model: ModelConfig, attention: MultiHeadAttentionConfig, heads: HeadShape, extent: ActivationShape, rotated: bool, *, read: bool
) -> Iterator[SavedTensor]:
    """`read`: what mixes them keeps them as they are; else it keeps copies of its own."""
    normed, share = attention.qk_norm != "none", heads.keys / extent.length
    read = read or extent.system.attention == "explicit"
    queries, keys = extent.compute_sharded_bytes(heads.queries * heads.key), int(extent.compute_sharded_bytes(heads.key_value_heads * heads.key) * share)
    keys_read = read and not must_repeat_key_value_heads(heads, extent)
    yield SavedTensor("queries", queries, "product", saved=normed or (read and not rotated))
    yield SavedTensor("keys", keys, "product", saved=normed or (keys_read and not rotated))
    yield SavedTensor("values", keys, "product", saved=keys_read)
    for name, size, kept in (("queries", queries, read), ("keys", keys, keys_read)):
        if normed:
            yield from _iter_head_norm_tensors(model, attention, name, size, extent, saved=kept and not rotated)
        if rotated:
            yield SavedTensor(f"rotated {name}", size, "pointwise", saved=kept)


def _iter_head_norm_tensors(
    model: ModelConfig, attention: MultiHeadAttentionConfig, name: str, size: int, extent: ActivationShape, *, saved: bool
) -> Iterator[SavedTensor]:
    """Norms of queries or keys, of `size` bytes: of each head or over all of them."""
    heads = model.num_attention_heads if name == "queries" else model.num_key_value_heads
    width = model.head_dim if attention.qk_norm == "head" else model.head_dim * heads
    rows = size // extent.value // width
    yield SavedTensor(f"statistics of normed {name}", rows * compute_norm_statistics_bytes(model, extent), "pointwise")
    if extent.is_on_cpu and extent.value == 4 and model.norm.kind == "rmsnorm":
        yield SavedTensor(f"unscaled {name}", size, "fused")
    yield SavedTensor(f"normed {name}", size, "pointwise", saved=saved)


def compute_norm_statistics_bytes(model: ModelConfig, extent: ActivationShape) -> int:
    """What a norm keeps of each row beside its input: a scale, and of LayerNorm a mean too, on GPUs in float32."""
    if model.norm.kind == "rmsnorm":
        return 4
    return 2 * extent.value if extent.is_on_cpu else 8


def _iter_latent_tensors(count: int, latent: LatentAttentionConfig, extent: ActivationShape, *, read: bool) -> Iterator[SavedTensor]:
    """MLA: latents with their norms, whole queries and keys, and values as part of one product with the keys."""
    rank, rotated, nope = latent.kv_lora_rank, latent.qk_rope_head_dim, latent.qk_nope_head_dim
    if latent.q_lora_rank is not None:
        yield SavedTensor("query latent", extent.compute_residual_bytes(latent.q_lora_rank), "product")
        yield from _iter_latent_norm_tensors("query latent", latent.q_lora_rank, extent)
    yield SavedTensor("query parts", extent.compute_sharded_bytes(count * (nope + rotated)), "product", saved=False)
    yield SavedTensor("key-value latent", extent.compute_residual_bytes(rank + rotated), "product")
    yield from _iter_latent_norm_tensors("key-value latent", rank, extent)
    yield SavedTensor("keys and values", extent.compute_sharded_bytes(count * (nope + latent.v_head_dim)), "product", saved=read)
    yield SavedTensor("whole queries", extent.compute_sharded_bytes(count * (nope + rotated)), "pointwise", saved=read)
    yield SavedTensor("whole keys", extent.compute_sharded_bytes(count * (nope + rotated)), "pointwise", saved=read)


def _iter_latent_norm_tensors(name: str, channels: int, extent: ActivationShape) -> Iterator[SavedTensor]:
    yield SavedTensor(f"statistics of the {name}", extent.compute_residual_bytes(1, 4), "pointwise")
    if extent.is_on_cpu and extent.value == 4:  # made of several operations
        yield SavedTensor(f"unscaled {name}", extent.compute_residual_bytes(channels), "fused")
    yield SavedTensor(f"normed {name}", extent.compute_residual_bytes(channels), "pointwise")
