"""The tensors that attention makes for one block: projections, norms of heads, rotations, and the way to its output."""

from collections.abc import Iterator

from llmsys.config.attention import Latent, MultiHead
from llmsys.config.model import ModelConfig
from llmsys.estimate.kept import Extent, Tensor
from llmsys.estimate.kept_scores import Heads, mixing_tensors, repeats, way_of


def attention_tensors(model: ModelConfig, layer: int, extent: Extent, *, output_saved: bool) -> Iterator[Tensor]:
    """Self-attention of block `layer`. `output_saved`: a norm behind it keeps what it gives."""
    causal, count = model.family != "encoder", model.num_attention_heads
    if model.attention.kind == "latent":
        latent = model.attention
        width = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        heads = Heads(count, count, width, latent.v_head_dim, extent.length, causal)
        way = way_of(model, heads, extent, own=True)
        yield from _latent(count, latent, extent, read=way == "kernel")
    else:
        heads = Heads(count, model.num_key_value_heads, model.head_dim, model.head_dim, extent.length, causal)
        way = way_of(model, heads, extent, own=True)
        yield from _projected(model, model.attention, heads, extent, model.rotates(layer), read=way == "kernel")
    yield from mixing_tensors(model, heads, way, extent)
    yield from reduced_product("attention projection", model, extent, output_saved)


def cross_attention_tensors(model: ModelConfig, extent: Extent, *, output_saved: bool) -> Iterator[Tensor]:
    """Queries of the target's positions, keys and values of the source's."""
    attention = model.attention if model.attention.kind == "multi_head" else MultiHead()
    count, groups, width = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    heads = Heads(count, groups, width, width, extent.source, causal=False)
    way = way_of(model, heads, extent, own=False)
    yield from _projected(model, attention, heads, extent, rotated=False, read=way in ("kernel", "explicit"))
    yield from mixing_tensors(model, heads, way, extent)
    yield from reduced_product("cross-attention projection", model, extent, output_saved)


def reduced_product(name: str, model: ModelConfig, extent: Extent, saved: bool) -> Iterator[Tensor]:
    """The last product of a branch: all positions, and after the sum over tensor ranks this rank's."""
    if extent.tensor == 1:
        yield Tensor(name, extent.stream(model.hidden_size), "product", saved, needed=saved)
        return
    yield Tensor(f"{name}, partial", extent.gathered(model.hidden_size), "product", saved=False, needed=False)
    yield Tensor(name, extent.stream(model.hidden_size), "collective", saved, needed=saved)


def _projected(
    model: ModelConfig, attention: MultiHead, heads: Heads, extent: Extent, rotated: bool, *, read: bool
) -> Iterator[Tensor]:
    """`read`: what mixes them keeps them as they are; else it keeps copies of its own."""
    normed, share = attention.qk_norm != "none", heads.keys / extent.length
    read = read or extent.system.attention == "explicit"
    queries, keys = extent.inner(heads.queries * heads.key), int(extent.inner(heads.groups * heads.key) * share)
    keys_read = read and not repeats(heads, extent)
    yield Tensor("queries", queries, "product", saved=normed or (read and not rotated))
    yield Tensor("keys", keys, "product", saved=normed or (keys_read and not rotated))
    yield Tensor("values", keys, "product", saved=keys_read)
    for name, size, kept in (("queries", queries, read), ("keys", keys, keys_read)):
        if normed:
            yield from _head_norm(model, attention, name, size, extent, saved=kept and not rotated)
        if rotated:
            yield Tensor(f"rotated {name}", size, "pointwise", saved=kept)


def _head_norm(
    model: ModelConfig, attention: MultiHead, name: str, size: int, extent: Extent, *, saved: bool
) -> Iterator[Tensor]:
    """Norms of queries or keys, of `size` bytes: of each head or over all of them."""
    heads = model.num_attention_heads if name == "queries" else model.num_key_value_heads
    width = model.head_dim if attention.qk_norm == "head" else model.head_dim * heads
    rows = size // extent.value // width
    yield Tensor(f"statistics of normed {name}", rows * statistics_bytes(model, extent), "pointwise")
    if extent.on_cpu and extent.value == 4 and model.norm.kind == "rmsnorm":
        yield Tensor(f"unscaled {name}", size, "fused")
    yield Tensor(f"normed {name}", size, "pointwise", saved=saved)


def statistics_bytes(model: ModelConfig, extent: Extent) -> int:
    """What a norm keeps of each row beside its input: a scale, and of LayerNorm a mean too, on GPUs in float32."""
    if model.norm.kind == "rmsnorm":
        return 4
    return 2 * extent.value if extent.on_cpu else 8


def _latent(count: int, latent: Latent, extent: Extent, *, read: bool) -> Iterator[Tensor]:
    """MLA: latents with their norms, whole queries and keys, and values as part of one product with the keys."""
    rank, rotated, nope = latent.kv_lora_rank, latent.qk_rope_head_dim, latent.qk_nope_head_dim
    if latent.q_lora_rank is not None:
        yield Tensor("query latent", extent.stream(latent.q_lora_rank), "product")
        yield from _latent_norm("query latent", latent.q_lora_rank, extent)
    yield Tensor("query parts", extent.inner(count * (nope + rotated)), "product", saved=False)
    yield Tensor("key-value latent", extent.stream(rank + rotated), "product")
    yield from _latent_norm("key-value latent", rank, extent)
    yield Tensor("keys and values", extent.inner(count * (nope + latent.v_head_dim)), "product", saved=read)
    yield Tensor("whole queries", extent.inner(count * (nope + rotated)), "pointwise", saved=read)
    yield Tensor("whole keys", extent.inner(count * (nope + rotated)), "pointwise", saved=read)


def _latent_norm(name: str, channels: int, extent: Extent) -> Iterator[Tensor]:
    yield Tensor(f"statistics of the {name}", extent.stream(1, 4), "pointwise")
    if extent.on_cpu and extent.value == 4:  # made of several operations
        yield Tensor(f"unscaled {name}", extent.stream(channels), "fused")
    yield Tensor(f"normed {name}", extent.stream(channels), "pointwise")
