"""Latent attention with a lightning indexer as its formulas say it (arXiv:2512.02556, equations 1
to 4), one query, key and head at a time. Uses none of the code that it checks.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from tests.reference.attention import compute_mean, rotate
from tests.reference.layers import apply_linear, compute_rms


def rotate_by(config: ModelConfig, pairing: str, x: Tensor, position: int) -> Tensor:
    rope: Any = config.position
    other = config.model_copy(update={"position": rope.model_copy(update={"pairing": pairing})})
    return rotate(other, 0, x, position)


def compute_index_scores(
    config: ModelConfig, p: Mapping[str, Tensor], name: str, x: list[Tensor], latents: list[Tensor]
) -> list[list[Tensor]]:
    """The score of each key s for each query t."""
    latent: Any = config.attention
    sparse, rope = latent.sparse, latent.qk_rope_head_dim
    heads, width = sparse.index_n_heads, sparse.index_head_dim

    def turn(vector: Tensor, position: int) -> Tensor:
        return torch.cat(
            [rotate_by(config, sparse.pairing, vector[:rope], position), vector[rope:]]
        )

    keys = []
    for s, one in enumerate(x):
        k = apply_linear(p, f"{name}.k_proj", one.detach())
        k = (k - k.mean()) / (k.var(unbiased=False) + 1e-6).sqrt()
        keys.append(turn(k * p[f"{name}.k_norm.weight"] + p[f"{name}.k_norm.bias"], s))
    rows = []
    for t, one in enumerate(x):
        queries = apply_linear(p, f"{name}.q_b_proj", latents[t].detach()).view(heads, width)
        weights = apply_linear(p, f"{name}.weights_proj", one.detach())
        rows.append(
            [
                sum(
                    w / heads**0.5 * torch.relu(turn(q, t) @ key) / width**0.5
                    for w, q in zip(weights, queries, strict=True)
                )
                for key in keys
            ]
        )
    return rows


def choose_keys(scores: list[Tensor], visible: list[int], top: int) -> list[int]:
    """The best keys; of equal ones the earlier."""
    best = sorted(visible, key=lambda s: (-float(scores[s].detach()), s))
    return sorted(best[:top])


def compute_sparse_attention(
    config: ModelConfig, p: Mapping[str, Tensor], x: list[Tensor], documents: list[int]
) -> tuple[list[Tensor], Tensor, list[list[int]]]:
    """The outputs, the loss of the indexer summed over real queries, and the keys of each query."""
    latent: Any = config.attention
    nope, rope, width = latent.qk_nope_head_dim, latent.qk_rope_head_dim, latent.v_head_dim
    heads, rank = config.num_attention_heads, latent.kv_lora_rank
    pairing = config.position.pairing
    queries, keys, values, latents = [], [], [], []
    for t, one in enumerate(x):
        c = apply_linear(p, "q_a_proj", one)
        latents.append(compute_rms(c, latent.norm_eps) * p["q_a_norm.weight"])
        q = apply_linear(p, "q_b_proj", latents[t]).view(heads, nope + rope)
        joint = apply_linear(p, "kv_a_proj", one)
        shared = rotate_by(config, pairing, joint[rank:], t)
        c = compute_rms(joint[:rank], latent.norm_eps) * p["kv_a_norm.weight"]
        kv = apply_linear(p, "kv_b_proj", c).view(heads, nope + width)
        queries.append([torch.cat([h[:nope], rotate_by(config, pairing, h[nope:], t)]) for h in q])
        keys.append([torch.cat([h[:nope], shared]) for h in kv])
        values.append([h[nope:] for h in kv])
    index = compute_index_scores(config, p, "indexer", x, latents)
    outputs, chosen, loss = [], [], torch.zeros((), dtype=torch.float64)
    for t in range(len(x)):
        seen = [s for s in range(t + 1) if documents[s] == documents[t]]
        if latent.sparse.phase == "sparse":
            seen = choose_keys(index[t], seen, latent.sparse.index_topk)
        chosen.append(seen)
        mixed, mean = [], torch.zeros(len(seen), dtype=torch.float64)
        for head in range(heads):
            scores = [queries[t][head] @ keys[s][head] * (nope + rope) ** -0.5 for s in seen]
            mixed.append(compute_mean([values[s][head] for s in seen], scores, None))
            mean = mean + torch.stack(scores).detach().softmax(0) / heads
        outputs.append(apply_linear(p, "o_proj", torch.cat(mixed)))
        logs = torch.stack([index[t][s] for s in seen]).log_softmax(0)
        if documents[t] >= 0:
            loss = loss + (mean * (mean.log() - logs)).sum()
    return outputs, loss, chosen
