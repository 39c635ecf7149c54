"""The tensors between queries, keys and values and what attention gives: by which of its ways it is computed.

The ways are those of `llmsys/model/scaled_dot_product.py`; which one a config takes depends on the device too.

The tensors that attention makes for one block: projections, norms of heads, rotations, and the way to its output.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.estimate.saved_tensors import ActivationShape, SavedTensor
from llmsys.estimate.state_memory import FP32

CHUNKED_UP_TO, CHUNK = 2048, 128  # llmsys/model/cpu_attention.py

Way = Literal["kernel", "chunked", "composed", "plain", "explicit"]
"""kernel: fused, keeps its inputs and a logsumexp; chunked: the CPU's for 16 bits; composed: torch's own fall-back, in
float32; plain: our operations for what no kernel knows; explicit: Megatron's before fused attention, in 16 bits."""


@dataclass(frozen=True)
class HeadShape:
    """What is mixed: query heads, key-value heads, channels of a key and of a value, and how many keys there are."""

    queries: int
    key_value_heads: int
    key: int
    value: int
    keys: int
    causal: bool


def choose_attention_kernel(model: ModelConfig, heads: HeadShape, extent: ActivationShape, *, own: bool) -> Way:
    """How these heads are mixed; `own`: of a sequence to itself, where positions can be a bias."""
    attention = model.attention if isinstance(model.attention, MultiHeadAttentionConfig) else MultiHeadAttentionConfig()
    if extent.system.attention == "explicit":
        return "explicit"
    unknown = attention.logit_softcap is not None or (attention.sinks and own)
    if unknown or (model.dropout.attention > 0 and extent.is_on_cpu):
        return "plain"
    trained_bias = own and model.position.kind in ("relative_bias", "transformer_xl")
    if extent.is_on_cpu and (trained_bias or heads.key != heads.value):
        return "composed"
    scale = attention.scale is None or abs(attention.scale * heads.key**0.5 - 1) < 1e-9
    biased = own and model.position.kind == "alibi"
    suits = extent.is_on_cpu and extent.value == 2 and max(extent.length, heads.keys) <= CHUNKED_UP_TO
    return "chunked" if suits and scale and not biased else "kernel"


def iter_score_tensors(
    model: ModelConfig, heads: HeadShape, way: Way, extent: ActivationShape
) -> Iterator[SavedTensor]:
    """Copies of queries, keys and values where a way makes its own, scores where it keeps them, and the output."""
    yield from _iter_input_copies(heads, way, extent)
    if model.position.kind == "transformer_xl":
        yield from _iter_distance_tensors(heads, extent)
    yield from _iter_saved_scores(model, heads, way, extent)
    fused = way in ("kernel", "chunked", "explicit")
    output = extent.compute_sharded_bytes(heads.queries * heads.value)
    yield SavedTensor("attention output", output, "attention" if fused else "pointwise")


def _iter_input_copies(heads: HeadShape, way: Way, extent: ActivationShape) -> Iterator[SavedTensor]:
    share, size = heads.keys / extent.length, FP32 if way == "composed" else extent.value
    keys = heads.key_value_heads * heads.key, heads.key_value_heads * heads.value
    if way in ("composed", "plain"):
        keys = heads.queries * heads.key, heads.queries * heads.value  # of every query head
    if way in ("composed", "plain", "chunked"):
        yield SavedTensor(
            "queries as they are multiplied", extent.compute_sharded_bytes(heads.queries * heads.key, size), "pointwise"
        )
        yield SavedTensor(
            "keys and values likewise", int(extent.compute_sharded_bytes(sum(keys), size) * share), "pointwise"
        )
    elif way == "kernel" and must_repeat_key_value_heads(heads, extent):
        yield SavedTensor(
            "keys and values of every head",
            int(2 * extent.compute_sharded_bytes(heads.queries * heads.key) * share),
            "fused",
        )


def must_repeat_key_value_heads(heads: HeadShape, extent: ActivationShape) -> bool:
    """Whether keys are copied for every query head: the fused kernel of GPUs that takes a table knows no groups."""
    return extent.table != "none" and not extent.is_on_cpu and heads.key_value_heads != heads.queries


def _iter_saved_scores(
    model: ModelConfig, heads: HeadShape, way: Way, extent: ActivationShape
) -> Iterator[SavedTensor]:
    count, keys, dropped = heads.queries, heads.keys, model.dropout.attention > 0
    if way == "kernel":
        yield SavedTensor("logsumexp", extent.compute_sharded_bytes(count, FP32), "attention")
    elif way == "chunked":
        share = _compute_causal_share(extent.length) if heads.causal else 1.0
        yield SavedTensor("probabilities", int(extent.compute_score_bytes(count, keys=keys) * share), "attention")
    elif way == "explicit":  # Korthikanti 2022, 4.1: softmax 2as, mask as, what is left of it 2as
        yield SavedTensor("scores, softmax", extent.compute_score_bytes(count, keys=keys), "pointwise")
    else:
        yield from _iter_unfused_scores(model, heads, way, extent)
    if way == "kernel" and extent.table in ("windows", "documents"):  # a table of yes and no becomes numbers
        rows = extent.sequences if extent.table == "documents" else 1
        yield SavedTensor("table as numbers", rows * extent.length * keys * extent.value, "fused")
    if dropped and way != "kernel":
        mask = extent.value if extent.is_on_cpu else 1
        yield SavedTensor("scores, dropout mask", extent.compute_score_bytes(count, mask, keys=keys), "pointwise")
        yield SavedTensor("scores, dropped", extent.compute_score_bytes(count, keys=keys), "pointwise")


def _iter_unfused_scores(
    model: ModelConfig, heads: HeadShape, way: Way, extent: ActivationShape
) -> Iterator[SavedTensor]:
    """T × S for every head: softmax in float32, and without dropout the weights in 16 bits."""
    attention, count, keys = model.attention, heads.queries, heads.keys
    if way == "plain" and isinstance(attention, MultiHeadAttentionConfig):
        if attention.logit_softcap is not None:
            yield SavedTensor("scores, capped", extent.compute_score_bytes(count, keys=keys), "pointwise")
        keys += bool(attention.sinks)
    yield SavedTensor("scores, softmax", extent.compute_score_bytes(count, FP32, keys=keys), "pointwise")
    if way == "plain" and extent.value != FP32 and not model.dropout.attention:
        yield SavedTensor("scores, weights", extent.compute_score_bytes(count, keys=heads.keys), "pointwise")


def _iter_distance_tensors(heads: HeadShape, extent: ActivationShape) -> Iterator[SavedTensor]:
    """Transformer-XL: a key for each distance, the queries for it, and scores of 2T − 1 distances."""
    distances = 2 * extent.length - 1
    yield SavedTensor("keys of distances", int(distances * heads.queries * heads.key * extent.value), "product")
    yield SavedTensor("queries of distances", extent.compute_sharded_bytes(heads.queries * heads.key), "pointwise")
    yield SavedTensor("scores by distance", extent.compute_score_bytes(heads.queries, keys=distances), "pointwise")
    yield SavedTensor("which distance", 8 * extent.length**2, "pointwise")


def _compute_causal_share(length: int) -> float:
    """Of T × T scores, those that causal attention by chunks computes: up to the end of each chunk."""
    starts = range(0, length, CHUNK)
    return sum((min(one + CHUNK, length) - one) * min(one + CHUNK, length) for one in starts) / length**2


def iter_attention_tensors(
    model: ModelConfig, layer: int, extent: ActivationShape, *, output_saved: bool
) -> Iterator[SavedTensor]:
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
        yield from _iter_projection_tensors(
            model, model.attention, heads, extent, model.uses_rope(layer), read=way == "kernel"
        )
    yield from iter_score_tensors(model, heads, way, extent)
    yield from iter_output_projection("attention projection", model, extent, output_saved)


def iter_cross_attention_tensors(
    model: ModelConfig, extent: ActivationShape, *, output_saved: bool
) -> Iterator[SavedTensor]:
    """Queries of the target's positions, keys and values of the source's."""
    attention = model.attention if model.attention.kind == "multi_head" else MultiHeadAttentionConfig()
    count, groups, width = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    heads = HeadShape(count, groups, width, width, extent.source, causal=False)
    way = choose_attention_kernel(model, heads, extent, own=False)
    yield from _iter_projection_tensors(
        model, attention, heads, extent, rotated=False, read=way in ("kernel", "explicit")
    )
    yield from iter_score_tensors(model, heads, way, extent)
    yield from iter_output_projection("cross-attention projection", model, extent, output_saved)


def iter_output_projection(
    name: str, model: ModelConfig, extent: ActivationShape, saved: bool
) -> Iterator[SavedTensor]:
    """The last product of a branch: all positions, and after the sum over tensor ranks this rank's."""
    if extent.tensor == 1:
        yield SavedTensor(name, extent.compute_residual_bytes(model.hidden_size), "product", saved, is_needed=saved)
        return
    yield SavedTensor(
        f"{name}, partial", extent.compute_gathered_bytes(model.hidden_size), "product", saved=False, is_needed=False
    )
    yield SavedTensor(name, extent.compute_residual_bytes(model.hidden_size), "collective", saved, is_needed=saved)


def _iter_projection_tensors(
    model: ModelConfig,
    attention: MultiHeadAttentionConfig,
    heads: HeadShape,
    extent: ActivationShape,
    rotated: bool,
    *,
    read: bool,
) -> Iterator[SavedTensor]:
    """`read`: what mixes them keeps them as they are; else it keeps copies of its own."""
    normed, share = attention.qk_norm != "none", heads.keys / extent.length
    read = read or extent.system.attention == "explicit"
    queries, keys = (
        extent.compute_sharded_bytes(heads.queries * heads.key),
        int(extent.compute_sharded_bytes(heads.key_value_heads * heads.key) * share),
    )
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
    model: ModelConfig,
    attention: MultiHeadAttentionConfig,
    name: str,
    size: int,
    extent: ActivationShape,
    *,
    saved: bool,
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


def _iter_latent_tensors(
    count: int, latent: LatentAttentionConfig, extent: ActivationShape, *, read: bool
) -> Iterator[SavedTensor]:
    """MLA: latents with their norms, whole queries and keys, and values as part of one product with the keys."""
    rank, rotated, nope = latent.kv_lora_rank, latent.qk_rope_head_dim, latent.qk_nope_head_dim
    if latent.q_lora_rank is not None:
        yield SavedTensor("query latent", extent.compute_residual_bytes(latent.q_lora_rank), "product")
        yield from _iter_latent_norm_tensors("query latent", latent.q_lora_rank, extent)
    yield SavedTensor("query parts", extent.compute_sharded_bytes(count * (nope + rotated)), "product", saved=False)
    yield SavedTensor("key-value latent", extent.compute_residual_bytes(rank + rotated), "product")
    yield from _iter_latent_norm_tensors("key-value latent", rank, extent)
    yield SavedTensor(
        "keys and values", extent.compute_sharded_bytes(count * (nope + latent.v_head_dim)), "product", saved=read
    )
    yield SavedTensor("whole queries", extent.compute_sharded_bytes(count * (nope + rotated)), "pointwise", saved=read)
    yield SavedTensor("whole keys", extent.compute_sharded_bytes(count * (nope + rotated)), "pointwise", saved=read)


def _iter_latent_norm_tensors(name: str, channels: int, extent: ActivationShape) -> Iterator[SavedTensor]:
    yield SavedTensor(f"statistics of the {name}", extent.compute_residual_bytes(1, 4), "pointwise")
    if extent.is_on_cpu and extent.value == 4:  # made of several operations
        yield SavedTensor(f"unscaled {name}", extent.compute_residual_bytes(channels), "fused")
    yield SavedTensor(f"normed {name}", extent.compute_residual_bytes(channels), "pointwise")
