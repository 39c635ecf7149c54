"""The Transformer as its formulas say it, one position, head, token and expert at a time: slow, and easy to believe.

Takes the parameters as a mapping from name to tensor (the names of `llmsys.model.transformer`), so autograd gives their
gradients. Uses no fused operation, no mask tensor and none of the code it checks.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig

Parameters = Mapping[str, Tensor]


def logits(config: ModelConfig, parameters: Parameters, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """(rows, positions) of token ids to (rows, positions, vocabulary)."""
    embedding = parameters["embed.weight"]
    head = embedding if config.tie_word_embeddings else parameters["head.weight"]
    rows = []
    for row in range(tokens.shape[0]):
        x = [embedding[int(token)] for token in tokens[row]]
        numbers = None if documents is None else documents[row].tolist()
        for layer in range(config.num_hidden_layers):
            x = block(config, parameters, layer, x, numbers)
        rows.append(torch.stack([head @ norm(config, parameters, "norm", one) for one in x]))
    return torch.stack(rows)


def block(
    config: ModelConfig, parameters: Parameters, layer: int, x: list[Tensor], documents: list[int] | None
) -> list[Tensor]:
    name = f"blocks.{layer}"
    normed = [norm(config, parameters, f"{name}.attention_norm", one) for one in x]
    attended = attention(config, parameters, f"{name}.attention", normed, documents)
    x = [one + change for one, change in zip(x, attended, strict=True)]
    normed = [norm(config, parameters, f"{name}.feed_forward_norm", one) for one in x]
    feed = mixture if config.moe is not None and layer >= config.moe.first_dense_layers else dense
    return [one + feed(config, parameters, f"{name}.feed_forward", inner) for one, inner in zip(x, normed, strict=True)]


def norm(config: ModelConfig, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    if config.norm.kind == "rmsnorm":
        return x / (x.pow(2).mean() + config.norm.eps).sqrt() * parameters[f"{name}.weight"]
    centred = x - x.mean()
    scaled = centred / (centred.pow(2).mean() + config.norm.eps).sqrt()
    return scaled * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]


def rotate(config: ModelConfig, x: Tensor, position: int) -> Tensor:
    """Turn the pair (x_i, x_{i + half}) by position * theta^(-2i / width), as a complex number."""
    if config.position.kind == "none":
        return x
    half = x.shape[0] // 2
    turned = list(x.unbind())
    for i in range(half):
        angle = position * config.position.theta ** (-2 * i / x.shape[0])
        turned[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        turned[i + half] = x[i] * math.sin(angle) + x[i + half] * math.cos(angle)
    return torch.stack(turned)


def attention(
    config: ModelConfig, parameters: Parameters, name: str, x: list[Tensor], documents: list[int] | None
) -> list[Tensor]:
    width, shared_by = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    q, k, v = ([parameters[f"{name}.{which}_proj.weight"] @ one for one in x] for which in "qkv")
    outputs = []
    for t in range(len(x)):
        heads = []
        for head in range(config.num_attention_heads):
            mine = slice(head * width, (head + 1) * width)
            theirs = slice(head // shared_by * width, (head // shared_by + 1) * width)
            query = rotate(config, q[t][mine], t)
            seen = [s for s in range(t + 1) if documents is None or documents[s] == documents[t]]
            scores = [query @ rotate(config, k[s][theirs], s) / math.sqrt(width) for s in seen]
            exponentials = [(score - max(scores).detach()).exp() for score in scores]
            total = sum(exponentials)
            heads.append(sum(e / total * v[s][theirs] for e, s in zip(exponentials, seen, strict=True)))
        outputs.append(parameters[f"{name}.o_proj.weight"] @ torch.cat(heads))
    return outputs


def dense(config: ModelConfig, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    up = parameters[f"{name}.up_proj.weight"] @ x
    if config.feed_forward.kind == "swiglu":
        hidden = silu(parameters[f"{name}.gate_proj.weight"] @ x) * up
    elif config.feed_forward.kind == "relu":
        hidden = up.clamp(min=0)
    else:
        hidden = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    return parameters[f"{name}.down_proj.weight"] @ hidden


def mixture(config: ModelConfig, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    moe = config.moe
    logit = parameters[f"{name}.router.weight"] @ x
    score = logit.exp() / logit.exp().sum() if moe.score == "softmax" else 1 / (1 + (-logit).exp())
    preference = score + parameters[f"{name}.balance_bias_E"] if moe.balance.kind == "bias" else score
    chosen = sorted(range(moe.num_experts), key=lambda e: -float(preference[e].detach()))[: moe.num_experts_per_tok]
    total = sum(score[e] for e in chosen) if moe.norm_topk_prob else 1.0
    y = torch.zeros_like(x)
    for e in chosen:
        gate, up, down = (parameters[f"{name}.experts.{which}_proj"][e] for which in ("gate", "up", "down"))
        y = y + moe.routed_scaling_factor * score[e] / total * ((silu(x @ gate) * (x @ up)) @ down)
    if moe.num_shared_experts:
        gate, up, down = (parameters[f"{name}.shared.{which}_proj.weight"] for which in ("gate", "up", "down"))
        y = y + down @ (silu(gate @ x) * (up @ x))
    return y


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())
