"""The tensors that attention makes for one block: projections, norms of heads, rotations, scores if any, the output."""

from collections.abc import Iterator

from llmsys.config.attention import Latent, MultiHead
from llmsys.config.model import ModelConfig
from llmsys.estimate.kept import Extent, Tensor

CHUNKED_UP_TO, CHUNK = 2048, 128  # llmsys/model/cpu_attention.py


def attention_tensors(model: ModelConfig, layer: int, extent: Extent, *, output_saved: bool) -> Iterator[Tensor]:
    """Self-attention of block `layer`. `output_saved`: a norm behind it keeps what it gives."""
    if model.attention.kind == "latent":
        yield from _latent(model, model.attention, extent)
        heads, width = model.num_attention_heads, model.attention.v_head_dim
    else:
        yield from _projected(model, model.attention, layer, extent)
        heads, width = model.num_attention_heads, model.head_dim
    yield from output_tensors(model, extent, heads * width, output_saved)


def cross_attention_tensors(model: ModelConfig, extent: Extent, *, output_saved: bool) -> Iterator[Tensor]:
    """Queries of the target's positions, keys and values of the source's."""
    attention = model.attention if model.attention.kind == "multi_head" else MultiHead()
    heads, groups, width = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    normed = attention.qk_norm != "none"
    share = extent.source / extent.length
    copied = _chunked(model, attention, extent, causal=False)
    yield Tensor("queries", extent.inner(heads * width), "product", saved=normed or not copied)
    yield Tensor("keys", int(extent.inner(groups * width) * share), "product", saved=normed or not copied)
    yield Tensor("values", int(extent.inner(groups * width) * share), "product", saved=not copied)
    for name, channels, part in (("queries", heads * width, 1.0), ("keys", groups * width, share)):
        if normed:
            yield from head_norm(model, attention, f"normed {name}", channels, extent, part, saved=not copied)
        if copied:
            yield Tensor(f"stacked {name}", int(extent.inner(channels) * part), "pointwise")
    if copied:
        yield Tensor("stacked values", int(extent.inner(groups * width) * share), "pointwise")
    yield from _scores(model, attention, extent, keys=extent.source, causal=False)
    yield from output_tensors(model, extent, heads * width, output_saved)


def output_tensors(model: ModelConfig, extent: Extent, width: int, saved: bool) -> Iterator[Tensor]:
    """What attention gives, and the product behind it; the sum over tensor ranks leaves each its positions."""
    yield Tensor("attention output", extent.inner(width), "attention")
    yield from reduced_product("attention projection", model, extent, saved)


def reduced_product(name: str, model: ModelConfig, extent: Extent, saved: bool) -> Iterator[Tensor]:
    """The last product of a branch: all positions, and after the sum over tensor ranks this rank's."""
    if extent.tensor == 1:
        yield Tensor(name, extent.stream(model.hidden_size), "product", saved, needed=saved)
        return
    yield Tensor(f"{name}, partial", extent.gathered(model.hidden_size), "product", saved=False, needed=False)
    yield Tensor(name, extent.stream(model.hidden_size), "collective", saved, needed=saved)


def _projected(model: ModelConfig, attention: MultiHead, layer: int, extent: Extent) -> Iterator[Tensor]:
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    normed, rotated = attention.qk_norm != "none", model.rotates(layer)
    copied = _chunked(model, attention, extent, causal=True)
    repeated = extent.masked and not extent.on_cpu and keys != queries  # GPU kernels that take a table know no groups
    plain = not (normed or rotated or copied)
    yield Tensor("queries", extent.inner(queries), "product", saved=normed or plain)
    yield Tensor("keys", extent.inner(keys), "product", saved=normed or (plain and not repeated))
    yield Tensor("values", extent.inner(keys), "product", saved=not (copied or repeated))
    for name, channels in (("queries", queries), ("keys", keys)):
        if normed:
            read = not (rotated or copied)
            yield from head_norm(model, attention, f"normed {name}", channels, extent, 1.0, saved=read)
        if rotated:
            kept = not (copied or (repeated and name == "keys"))
            yield Tensor(f"rotated {name}", extent.inner(channels), "pointwise", saved=kept)
        if copied:
            yield Tensor(f"stacked {name}", extent.inner(channels), "pointwise")
    if copied:
        yield Tensor("stacked values", extent.inner(keys), "pointwise")
    if repeated:
        yield Tensor("keys and values of every head", 2 * extent.inner(queries), "pointwise")
    yield from _scores(model, attention, extent, keys=extent.length, causal=True)


def head_norm(
    model: ModelConfig, attention: MultiHead, name: str, channels: int, extent: Extent, share: float, *, saved: bool
) -> Iterator[Tensor]:
    """Norms of queries or keys: of each head or over all of them."""
    rows = channels // model.head_dim if attention.qk_norm == "head" else 1
    statistics = extent.inner(rows, 8 if model.norm.kind == "layernorm" else 4)
    yield Tensor(f"statistics of {name}", int(statistics * share), "pointwise")
    if extent.on_cpu and extent.value == 4 and model.norm.kind == "rmsnorm":
        yield Tensor(f"unscaled {name}", int(extent.inner(channels) * share), "fused")
    yield Tensor(name, int(extent.inner(channels) * share), "pointwise", saved=saved)


def _chunked(model: ModelConfig, attention: MultiHead, extent: Extent, *, causal: bool) -> bool:
    """Whether the CPU's own path for 16 bits computes it, which keeps copies and probabilities."""
    suits = extent.on_cpu and extent.value == 2 and max(extent.length, extent.source) <= CHUNKED_UP_TO
    biased = causal and model.position.kind in ("alibi", "relative_bias", "transformer_xl")
    usual = attention.scale is None or abs(attention.scale * model.head_dim**0.5 - 1) < 1e-9
    return suits and usual and not biased and not _explicit(model, attention, extent)


def _explicit(model: ModelConfig, attention: MultiHead, extent: Extent) -> bool:
    """Whether no kernel knows this attention, so that plain operations with whole scores compute it."""
    dropped = model.dropout.attention > 0 and extent.on_cpu
    unknown = attention.logit_softcap is not None or attention.sinks or model.position.kind == "transformer_xl"
    return unknown or dropped or extent.system.attention == "explicit"


def _scores(model: ModelConfig, attention: MultiHead, extent: Extent, *, keys: int, causal: bool) -> Iterator[Tensor]:
    heads = model.num_attention_heads
    dropped = model.dropout.attention > 0
    if extent.system.attention == "explicit":  # Korthikanti 2022, 4.1: softmax 2as, mask as, what is left of it 2as
        yield Tensor("scores, softmax", extent.pairs(heads, keys=keys), "pointwise")
        if dropped:
            yield Tensor("scores, dropout mask", extent.pairs(heads, 1, keys=keys), "pointwise")
            yield Tensor("scores, dropped", extent.pairs(heads, keys=keys), "pointwise")
    elif _explicit(model, attention, extent):
        yield from _plain_scores(attention, extent, heads, keys, dropped)
    elif _chunked(model, attention, extent, causal=causal):
        share = _computed_share(extent.length) if causal and model.family != "encoder" else 1.0
        yield Tensor("probabilities", int(extent.pairs(heads, keys=keys) * share), "pointwise")
    else:
        yield Tensor("logsumexp", extent.inner(heads, 4), "attention")
        if extent.masked:
            table = extent.sequences * extent.length * keys * extent.value
            yield Tensor("mask as a bias", table, "pointwise")


def _plain_scores(attention: MultiHead, extent: Extent, heads: int, keys: int, dropped: bool) -> Iterator[Tensor]:
    """`plain_attention`: scores, softmax in float32, weights; each of T × S for every head."""
    if attention.logit_softcap is not None:
        yield Tensor("scores, capped", extent.pairs(heads, keys=keys), "pointwise")
    yield Tensor("scores, softmax", extent.pairs(heads, 4, keys=keys), "pointwise")
    if extent.value != 4:
        yield Tensor("scores, weights", extent.pairs(heads, keys=keys), "pointwise", saved=not dropped)
    if dropped:
        size = extent.value if extent.on_cpu else 1
        yield Tensor("scores, dropout mask", extent.pairs(heads, size, keys=keys), "pointwise")
        yield Tensor("scores, dropped", extent.pairs(heads, keys=keys), "pointwise")


def _computed_share(length: int) -> float:
    """Of T × T scores, those that causal attention by chunks computes: up to the end of each chunk."""
    ends = [min(start + CHUNK, length) for start in range(0, length, CHUNK)]
    return sum((end - start) * end for start, end in zip(range(0, length, CHUNK), ends, strict=True)) / length**2


def _latent(model: ModelConfig, latent: Latent, extent: Extent) -> Iterator[Tensor]:
    """MLA: latents with their norms, whole queries and keys, and values as part of one product with the keys."""
    heads, rank = model.num_attention_heads, latent.kv_lora_rank
    rotated, nope, value = latent.qk_rope_head_dim, latent.qk_nope_head_dim, latent.v_head_dim
    composed = extent.on_cpu and extent.value == 4  # norms of several operations
    if latent.q_lora_rank is not None:
        yield Tensor("query latent", extent.stream(latent.q_lora_rank), "product")
        yield from _latent_norm("query latent", latent.q_lora_rank, extent, composed)
    yield Tensor("query parts", extent.inner(heads * (nope + rotated)), "product", saved=False)
    yield Tensor("key-value latent", extent.stream(rank + rotated), "product")
    yield from _latent_norm("key-value latent", rank, extent, composed)
    yield Tensor("keys and values", extent.inner(heads * (nope + value)), "product")
    yield Tensor("queries", extent.inner(heads * (nope + rotated)), "pointwise")
    yield Tensor("keys", extent.inner(heads * (nope + rotated)), "pointwise")
    yield from _scores(model, MultiHead(), extent, keys=extent.length, causal=True)


def _latent_norm(name: str, channels: int, extent: Extent, composed: bool) -> Iterator[Tensor]:
    yield Tensor(f"statistics of the {name}", extent.stream(1, 4), "pointwise")
    if composed:
        yield Tensor(f"unscaled {name}", extent.stream(channels), "fused")
    yield Tensor(f"normed {name}", extent.stream(channels), "pointwise")
