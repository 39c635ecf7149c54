"""Attention as its formulas say it, one query and one head at a time, for every kind of positions
and masks.

Takes lists of vectors, gives lists of vectors. Uses no fused operation, no mask tensor and none of
the code it checks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from tests.reference.layers import apply_linear, apply_norm, compute_rms

Parameters = Mapping[str, Tensor]
Vectors = list[Tensor]


def compute_self_attention(
    config: ModelConfig,
    p: Parameters,
    name: str,
    layer: int,
    x: Vectors,
    documents: list[int],
    types: list[int],
    ids: list[int] | None = None,
) -> Vectors:
    if config.attention.kind == "latent":
        return compute_latent_attention(config, p, name, layer, x, documents)
    if config.attention.kind == "longformer":
        return compute_longformer_attention(config, p, name, layer, x, documents)
    if config.attention.kind == "linformer":
        return compute_linformer_attention(config, p, name, layer, x, documents)
    heads, shared_by = (
        config.num_attention_heads,
        config.num_attention_heads // config.num_key_value_heads,
    )
    q, k, v = (project_heads(config, p, name, which, x) for which in "qkv")
    if f"{name}.value_embedding.weight" in p:
        table = p[f"{name}.value_scale"] * p[f"{name}.value_embedding.weight"]
        added = [table[one].split(config.head_dim) for one in ids or []]
        v = [[a + b for a, b in zip(*both, strict=True)] for both in zip(v, added, strict=True)]
    cut_k, cut_v = (
        project_heads(config, p, name, which, [one.detach() for one in x]) for which in "kv"
    )
    outputs, near_k, near_v = [], k, v
    for t in range(len(x)):
        mixed = []
        begin = get_segment_start(config, t)  # what is before it is memory, without a gradient
        k, v = cut_k[:begin] + near_k[begin:], cut_v[:begin] + near_v[begin:]
        for head in range(heads):
            seen = [s for s in range(len(x)) if is_visible(config, layer, t, s, documents)]
            query = rotate(config, layer, q[t][head], t)
            keys = [rotate(config, layer, k[s][head // shared_by], s) for s in seen]
            if f"{name}.content_bias" in p:
                query = query + p[f"{name}.content_bias"][head]
            scores = [cap_scores(config, query @ key * scale(config)) for key in keys]
            extra = [
                compute_position_score(config, p, name, head, q[t][head], t, s, types) for s in seen
            ]
            scores = [score + more for score, more in zip(scores, extra, strict=True)]
            sink = p.get(f"{name}.sinks", [None] * heads)[head]
            mixed.append(compute_mean([v[s][head // shared_by] for s in seen], scores, sink))
        outputs.append(apply_linear(p, f"{name}.o_proj", torch.cat(mixed)))
    return outputs


def compute_cross_attention(
    config: ModelConfig,
    p: Parameters,
    name: str,
    x: Vectors,
    documents: list[int],
    memory: Vectors,
    sources: list[int],
) -> Vectors:
    shared_by = config.num_attention_heads // config.num_key_value_heads
    q = project_heads(config, p, name, "q", x)
    k, v = (project_heads(config, p, name, which, memory) for which in "kv")
    outputs = []
    for t, number in enumerate(documents):
        seen = [s for s in range(len(memory)) if sources[s] == number] or list(range(len(memory)))
        mixed = []
        for head in range(config.num_attention_heads):
            theirs = head // shared_by
            scores = [cap_scores(config, q[t][head] @ k[s][theirs] * scale(config)) for s in seen]
            mixed.append(compute_mean([v[s][theirs] for s in seen], scores, None))
        outputs.append(apply_linear(p, f"{name}.o_proj", torch.cat(mixed)))
    return outputs


def compute_latent_attention(
    config: ModelConfig, p: Parameters, name: str, layer: int, x: Vectors, documents: list[int]
) -> Vectors:
    """DeepSeek-V2, equations 9 to 19, with keys and values of every head written out."""
    latent: Any = config.attention
    nope, rope, width = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    queries, keys, values = [], [], []
    for position, one in enumerate(x):
        if latent.q_lora_rank is None:
            q = apply_linear(p, f"{name}.q_proj", one)
        else:
            c = apply_linear(p, f"{name}.q_a_proj", one)
            q = apply_linear(
                p,
                f"{name}.q_b_proj",
                compute_rms(c, latent.norm_eps) * p[f"{name}.q_a_norm.weight"],
            )
        joint = apply_linear(p, f"{name}.kv_a_proj", one)
        c, shared = (
            joint[: latent.kv_lora_rank],
            rotate(config, layer, joint[latent.kv_lora_rank :], position),
        )
        kv = apply_linear(
            p, f"{name}.kv_b_proj", compute_rms(c, latent.norm_eps) * p[f"{name}.kv_a_norm.weight"]
        )
        q_heads, kv_heads = q.view(-1, nope + rope), kv.view(-1, nope + width)
        queries.append(
            [torch.cat([h[:nope], rotate(config, layer, h[nope:], position)]) for h in q_heads]
        )
        keys.append([torch.cat([h[:nope], shared]) for h in kv_heads])
        values.append([h[nope:] for h in kv_heads])
    factor = latent.scale or 1 / math.sqrt(nope + rope)
    if (
        latent.scale is None
        and config.position.kind == "rope"
        and config.position.scaling.kind == "yarn"
    ):
        scaling = config.position.scaling
        factor *= (0.1 * (scaling.mscale_all_dim or 0) * math.log(scaling.factor) + 1) ** 2
    outputs = []
    for t in range(len(x)):
        seen = [s for s in range(len(x)) if is_visible(config, layer, t, s, documents)]
        mixed = []
        for head in range(config.num_attention_heads):
            scores = [queries[t][head] @ keys[s][head] * factor for s in seen]
            mixed.append(compute_mean([values[s][head] for s in seen], scores, None))
        outputs.append(apply_linear(p, f"{name}.o_proj", torch.cat(mixed)))
    return outputs


def compute_longformer_attention(
    config: ModelConfig, p: Parameters, name: str, layer: int, x: Vectors, documents: list[int]
) -> Vectors:
    """Beltagy 2020, 3.1: a window dilated by head, and leading positions that see and are seen by
    all.

    In a decoder the half of a window before a position, and itself.
    """
    kind: Any = config.attention
    radius, tokens = kind.windows[layer % len(kind.windows)] // 2, kind.num_global_tokens
    local = [project_heads(config, p, name, which, x) for which in "qkv"]
    everywhere = (
        [project_heads(config, p, f"{name}.global", which, x, "_") for which in "qkv"]
        if tokens
        else local
    )
    outputs = []
    for t in range(len(x)):
        q, k, v = everywhere if t < tokens else local
        mixed = []
        for head in range(config.num_attention_heads):
            dilation = kind.dilations[head % len(kind.dilations)]
            near = [
                s
                for s in range(len(x))
                if (t - s) % dilation == 0 and abs(t - s) <= radius * dilation
            ]
            near = [s for s in near if s <= t or config.family == "encoder"]
            seen = [
                s
                for s in range(len(x))
                if documents[s] == documents[t] and (min(s, t) < tokens or s in near)
            ]
            scores = [q[t][head] @ k[s][head] / math.sqrt(config.head_dim) for s in seen]
            mixed.append(compute_mean([v[s][head] for s in seen], scores, None))
        outputs.append(apply_linear(p, f"{name}.o_proj", torch.cat(mixed)))
    return outputs


def compute_linformer_attention(
    config: ModelConfig, p: Parameters, name: str, layer: int, x: Vectors, documents: list[int]
) -> Vectors:
    """Wang 2020, equation 7: keys and values are mixtures of all positions that are no padding."""
    kind: Any = config.attention
    shared_by, size = (
        config.num_attention_heads // config.num_key_value_heads,
        kind.projected_length,
    )
    q, k, v = (project_heads(config, p, name, which, x) for which in "qkv")
    first, last = {
        "layers": ("length_proj",) * 2,
        "key_value": (f"{name}.length_proj",) * 2,
    }.get(kind.sharing, (f"{name}.k_length_proj", f"{name}.v_length_proj"))
    real = [s for s in range(len(x)) if documents[s] >= 0]
    outputs = []
    for t in range(len(x)):
        mixed = []
        for head in range(config.num_attention_heads):
            theirs = head // shared_by
            start = theirs * size if kind.sharing == "none" else 0
            keys, values = [], []
            for n in range(start, start + size):
                rows = [rotate(config, layer, k[s][theirs], s) for s in real]
                weights = p[f"{first}.weight"][n], p[f"{last}.weight"][n]
                keys.append(sum(weights[0][s] * row for s, row in zip(real, rows, strict=True)))
                values.append(sum(weights[1][s] * v[s][theirs] for s in real))
            query = rotate(config, layer, q[t][head], t)
            mixed.append(
                compute_mean(
                    values,  # type: ignore[arg-type]
                    [query @ key / math.sqrt(config.head_dim) for key in keys],
                    None,
                )
            )
        outputs.append(apply_linear(p, f"{name}.o_proj", torch.cat(mixed)))
    return outputs


def project_heads(
    config: ModelConfig, p: Parameters, name: str, which: str, x: Vectors, joint: str = "."
) -> list[Vectors]:
    """Heads of queries, keys or values: mapped, normed, cut."""
    kind: Any = config.attention if config.attention.kind == "multi_head" else None
    rows = []
    for one in x:
        flat = apply_linear(p, f"{name}{joint}{which}_proj", one)
        if f"{name}.{which}_norm.weight" in p and kind.qk_norm == "full":
            flat = apply_norm(config, p, f"{name}.{which}_norm", flat)
        heads = list(flat.split(config.head_dim))
        if f"{name}.{which}_norm.weight" in p and kind.qk_norm == "head":
            heads = [apply_norm(config, p, f"{name}.{which}_norm", head) for head in heads]
        if kind is not None and kind.clip is not None:
            heads = [head.clamp(-kind.clip, kind.clip) for head in heads]
        rows.append(heads)
    return rows


def get_segment_start(config: ModelConfig, t: int) -> int:
    """Dai 2019, 3.2; 0 without a memory."""
    kind: Any = config.attention
    return t - t % kind.segment_length if kind.kind == "segment_memory" else 0


def is_visible(config: ModelConfig, layer: int, t: int, s: int, documents: list[int]) -> bool:
    if documents[t] != documents[s] or (s > t and config.family != "encoder"):
        return False
    if s < get_segment_start(config, t) - getattr(config.attention, "memory_length", 0):
        return False
    return config.get_attention_window(layer) is None or abs(t - s) < config.get_attention_window(
        layer
    )


def compute_mean(values: Vectors, scores: list[Tensor], sink: Tensor | None) -> Tensor:
    """The mean of the values, weighted by exp(score); a sink takes weight and gives nothing."""
    everything = scores if sink is None else [*scores, sink]
    top = max(score.detach() for score in everything)
    total = sum((score - top).exp() for score in everything)
    return sum(
        (score - top).exp() / total * value for score, value in zip(scores, values, strict=True)
    )  # type: ignore[return-value]


def scale(config: ModelConfig) -> float:
    given = config.attention.scale if config.attention.kind == "multi_head" else None
    return 1 / math.sqrt(config.head_dim) if given is None else given


def cap_scores(config: ModelConfig, score: Tensor) -> Tensor:
    cap = config.attention.logit_softcap if config.attention.kind == "multi_head" else None
    return score if cap is None else cap * torch.tanh(score / cap)


def rotate(config: ModelConfig, layer: int, x: Tensor, position: int) -> Tensor:
    """Turn the pair (x_i, x_j) by the angle position · theta^(-2i / width), as a complex number."""
    rope: Any = config.position
    if rope.kind != "rope" or not rope.layers[layer % len(rope.layers)]:
        return x
    width = len(x) if config.attention.kind == "latent" else int(len(x) * rope.fraction)
    theta, stretch = rope.theta, rope.scaling.factor if rope.scaling.kind == "linear" else 1.0
    if config.get_layer_type(layer) == "sliding_attention" and rope.sliding_theta is not None:
        theta, stretch = rope.sliding_theta, 1.0
    turned = list(x.unbind())
    for i in range(width // 2):
        first, second = (i, i + width // 2) if rope.pairing == "halves" else (2 * i, 2 * i + 1)
        angle = position / stretch * theta ** (-2 * i / width)
        turned[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        turned[second] = x[first] * math.sin(angle) + x[second] * math.cos(angle)
    return torch.stack(turned)


def compute_position_score(
    config: ModelConfig,
    p: Parameters,
    name: str,
    head: int,
    query: Tensor,
    t: int,
    s: int,
    types: list[int],
) -> Tensor | float:
    """What the places of query and key add to the score."""
    kind = config.position.kind
    if kind == "alibi":
        assert config.num_attention_heads == 4
        return -config.position.factor * 2.0 ** (-2 * (head + 1)) * abs(t - s)
    if kind == "relative_bias":
        return p[f"{name.split('blocks.')[0]}relative_bias.weight"][
            get_distance_bucket(config, s - t), head
        ]
    return (
        compute_xl_score(config, p, name, head, query, t - s, types[t] == types[s])
        if kind == "transformer_xl"
        else 0.0
    )


def get_distance_bucket(config: ModelConfig, ahead: int) -> int:
    """Raffel 2020: half of the buckets for exact distances, the rest for logarithmically growing
    ranges.
    """
    relative: Any = config.position
    count, offset, distance = relative.buckets, 0, max(-ahead, 0)
    if config.family == "encoder":
        count //= 2
        offset, distance = (count if ahead > 0 else 0), abs(ahead)
    exact = count // 2
    if distance < exact:
        return offset + distance
    share = math.log(distance / exact) / math.log(relative.max_distance / exact)
    return offset + min(exact + int(share * (count - exact)), count - 1)


def compute_xl_score(
    config: ModelConfig,
    p: Parameters,
    name: str,
    head: int,
    query: Tensor,
    distance: int,
    same: bool,
) -> Tensor:
    """(q + v) · W r(distance), and XLNet's (q + s) · e(same segment or not)."""
    width, heads = config.hidden_size, config.num_attention_heads
    waves = [distance / 10000 ** (2 * i / width) for i in range(width // 2)]
    r = torch.tensor(
        [math.sin(w) for w in waves] + [math.cos(w) for w in waves], dtype=torch.float64
    )
    mapped = apply_linear(p, f"{name}.position_proj", r).view(heads, -1)[head]
    score = (query + p.get(f"{name}.position_bias", torch.zeros(heads, 1))[head]) @ mapped
    if f"{name}.segment_embed" in p:
        embed = p[f"{name}.segment_embed"][0 if same else -1, head]
        score = score + (query + p[f"{name}.segment_bias"][head]) @ embed
    return score * scale(config)
