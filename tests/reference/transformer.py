"""The Transformer as its formulas say it, one row, position, head and expert at a time: slow, and
easy to believe.

Takes the parameters and saved buffers as a mapping from name to tensor (the names that checkpoints
have), so autograd gives their gradients. Attention is in attention.py, the other layers in
layers.py. Without dropout.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from tests.reference import rnn
from tests.reference.attention import (
    Parameters,
    Vectors,
    compute_cross_attention,
    compute_self_attention,
)
from tests.reference.layers import apply_activation, apply_dense, apply_linear, apply_norm
from tests.reference.moe import compute_mixture


def output(
    config: ModelConfig,
    p: Parameters,
    tokens: Tensor,
    documents: Tensor | None = None,
    source: Tensor | None = None,
    source_documents: Tensor | None = None,
    types: Tensor | None = None,
) -> Tensor:
    """(rows, positions) of token ids to logits for each position, or what else the head gives."""
    rows = []
    for row, ids in enumerate(tokens):
        numbers = [0] * len(ids) if documents is None else documents[row].tolist()
        segments = [0] * len(ids) if types is None else types[row].tolist()
        memory: Vectors = []
        sources: list[int] = []
        if source is not None:
            sources = (
                [0] * len(source[row])
                if source_documents is None
                else source_documents[row].tolist()
            )
            memory = encoded(config, p, source[row], sources)
        x = embedded(config, p, "embed", ids)
        if "token_types.weight" in p:
            x = [
                one + p["token_types.weight"][segment]
                for one, segment in zip(x, segments, strict=True)
            ]
        if "bigram_embed.weight" in p:
            x = [one + bigram(config, p, ids.tolist(), numbers, t) for t, one in enumerate(x)]
        x = stack(
            config,
            p,
            "",
            x,
            numbers,
            segments,
            alpha(config, encoder=False),
            memory,
            sources,
            ids.tolist(),
        )
        rows.append(headed(config, p, finished(config, p, "", x)))
    return torch.stack(rows)


def bigram(
    config: ModelConfig, p: Parameters, ids: list[int], documents: list[int], t: int
) -> Tensor:
    """The vector of a token and the one before it in its document, or of no token."""
    before = ids[t - 1] if t and documents[t - 1] == documents[t] else config.vocab_size
    table = p["bigram_embed.weight"]
    return table[(36313 * ids[t] ^ 27191 * before) % len(table)]


def encoded(config: ModelConfig, p: Parameters, ids: Tensor, documents: list[int]) -> Vectors:
    table = "embed" if config.embedding.source_vocab_size is None else "source_embed"
    x = embedded(config, p, table, ids)
    x = stack(
        config.encoder_model,
        p,
        "encoder.",
        x,
        documents,
        [0] * len(ids),
        alpha(config, encoder=True),
    )
    return finished(config, p, "encoder.", x)


def finished(config: ModelConfig, p: Parameters, prefix: str, x: Vectors) -> Vectors:
    return (
        [apply_norm(config, p, f"{prefix}norm", one) for one in x]
        if f"{prefix}norm.weight" in p
        else x
    )


def embedded(config: ModelConfig, p: Parameters, table: str, ids: Tensor) -> Vectors:
    scale: Any = config.embedding.scale
    scale = math.sqrt(config.hidden_size) if scale == "sqrt_hidden_size" else scale
    return [scale * p[f"{table}.weight"][int(one)] for one in ids]


def stack(
    config: ModelConfig,
    p: Parameters,
    prefix: str,
    x: Vectors,
    documents: list[int],
    types: list[int],
    alpha: float,
    memory: Vectors | None = None,
    sources: list[int] | None = None,
    ids: list[int] | None = None,
) -> Vectors:
    if config.recurrence is None:
        x = [
            one + added_position(config, p, prefix, place(documents, t)) for t, one in enumerate(x)
        ]
    if config.embedding.norm:
        x = [apply_norm(config, p, f"{prefix}embedding_norm", one) for one in x]
    if config.rnn is not None and config.family == "encoder":
        return rnn.encode(config, p, prefix, x, documents)
    if config.rnn is not None:
        return rnn.decode(config, p, x, memory or [], sources or [])
    if config.recurrence is not None:
        return recurrent(config, p, prefix, x, documents, types, alpha, memory, sources)
    depth = config.num_hidden_layers
    outputs: list[Vectors] = []
    for layer in range(depth):
        mirror = depth - 1 - layer
        if config.u_shaped_skips and mirror < depth // 2:
            scale = p["skip_scales"][mirror]
            x = [a + scale * b for a, b in zip(x, outputs[mirror], strict=True)]
        name = f"{prefix}blocks.{layer}"
        branches = branches_of(config, p, name, layer, documents, types, memory, sources, ids)
        x = block(config, p, f"{prefix}blocks.{layer}", x, branches, alpha)
        outputs.append(x)
    return x


def recurrent(
    config: ModelConfig,
    p: Parameters,
    prefix: str,
    x: Vectors,
    documents: list[int],
    types: list[int],
    alpha: float,
    memory: Vectors | None,
    sources: list[int] | None,
) -> Vectors:
    """Universal Transformer: one block in every step; with ACT, Graves 2016, equations 4 to 10,
    for each position.
    """
    name, kind = f"{prefix}blocks.0", cast(Any, config.recurrence)
    used: list[list[Any]] = [[] for _ in x]
    states: list[Vectors] = [[] for _ in x]
    halted = [False] * len(x)
    for step in range(1, config.num_hidden_layers + 1):
        clock = wave(config, step)
        entered = [
            one + added_position(config, p, prefix, place(documents, t)) + clock
            for t, one in enumerate(x)
        ]
        branches = branches_of(config, p, name, 0, documents, types, memory, sources)
        after = block(config, p, name, entered, branches, alpha)
        if kind.kind == "fixed":
            x = after
            continue
        for t in range(len(x)):
            if halted[t]:
                continue
            h = torch.sigmoid(apply_linear(p, f"{prefix}recurrence.halting", entered[t]))[0]
            x[t] = after[t]
            states[t].append(after[t])
            halted[t] = step == config.num_hidden_layers or bool(sum(used[t]) + h > kind.threshold)
            used[t].append(1 - sum(used[t]) if halted[t] else h)
    if kind.kind == "fixed":
        return x
    return [
        cast(Tensor, sum(w * s for w, s in zip(used[t], states[t], strict=True)))
        for t in range(len(x))
    ]


def wave(config: ModelConfig, step: int) -> Tensor:
    pairs = [step / 10000 ** (2 * i / config.hidden_size) for i in range(config.hidden_size // 2)]
    return torch.tensor([f(a) for a in pairs for f in (math.sin, math.cos)], dtype=torch.float64)


def predicted(config: ModelConfig, p: Parameters, ids: Tensor) -> list[Tensor]:
    """DeepSeek-V3, equations 21 to 23: for each depth k the logits at the positions that have a
    token k places on.
    """
    documents = [0] * len(ids)
    x = stack(config, p, "", embedded(config, p, "embed", ids), documents, documents, 1.0)
    logits, last = [], config.num_hidden_layers - 1
    for k in range(1, config.multi_token_prediction.depth + 1):
        name = f"prediction.{k - 1}"
        ahead = embedded(config, p, "embed", ids[k:])
        pairs = [
            torch.cat(
                [
                    apply_norm(config, p, f"{name}.embedding_norm", e),
                    apply_norm(config, p, f"{name}.hidden_norm", h),
                ]
            )
            for e, h in zip(ahead, x, strict=False)
        ]
        x = [apply_linear(p, f"{name}.projection", pair) for pair in pairs]
        branches = branches_of(config, p, f"{name}.block", last, documents, documents, None, None)
        x = block(config, p, f"{name}.block", x, branches, 1.0)
        logits.append(headed(config, p, [apply_norm(config, p, f"{name}.norm", one) for one in x]))
    return logits


def branches_of(
    config: ModelConfig,
    p: Parameters,
    name: str,
    layer: int,
    documents: list[int],
    types: list[int],
    memory: Vectors | None,
    sources: list[int] | None,
    ids: list[int] | None = None,
) -> dict[str, Any]:
    """What stands on the residual stream of one block, in order."""
    branches: dict[str, Any] = {
        "attention": lambda x: compute_self_attention(
            config, p, f"{name}.attention", layer, x, documents, types, ids
        )
    }
    if memory:
        branches["cross_attention"] = lambda x: compute_cross_attention(
            config,
            p,
            f"{name}.cross_attention",
            x,
            documents,
            memory,
            sources,  # type: ignore[arg-type]
        )
    if f"{name}.feed_forward.router.weight" in p:
        branches["feed_forward"] = lambda x: experts(config, p, f"{name}.feed_forward.", x)
    else:
        branches["feed_forward"] = lambda x: [
            apply_dense(config, p, f"{name}.feed_forward", one) for one in x
        ]
    return branches


def experts(config: ModelConfig, p: Parameters, prefix: str, x: Vectors) -> Vectors:
    own = {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}
    rows = torch.stack(x)[None]
    return list(
        compute_mixture(
            config.moe,  # type: ignore[arg-type]
            own,
            rows,
            torch.ones(1, len(x), dtype=torch.bool),
            training=False,
        )[0]
    )


def block(
    config: ModelConfig,
    p: Parameters,
    name: str,
    x: Vectors,
    branches: dict[str, Any],
    alpha: float,
) -> Vectors:
    kind = config.residual.kind

    def normed(which: str, vectors: Vectors) -> Vectors:
        return [apply_norm(config, p, f"{name}.{which}", one) for one in vectors]

    def plus(a: Vectors, b: Vectors, factor: float = 1.0) -> Vectors:
        return [factor * one + other for one, other in zip(a, b, strict=True)]

    if kind == "parallel":
        y = x
        for which, run in branches.items():
            own = f"{name}.{which}_norm.weight" in p
            y = plus(y, run(normed(f"{which}_norm" if own else "attention_norm", x)))
        return y
    for which, run in branches.items():
        if kind == "pre":
            x = plus(x, run(normed(f"{which}_norm", x)))
        elif kind == "post":
            x = normed(f"{which}_norm", plus(x, run(x)))
        elif kind == "deepnorm":
            x = normed(f"{which}_norm", plus(x, run(x), alpha))
        elif kind == "sandwich":
            x = plus(x, normed(f"{which}_output_norm", run(normed(f"{which}_norm", x))))
        else:
            x = plus(x, normed(f"{which}_output_norm", run(x)))
    return x


def alpha(config: ModelConfig, encoder: bool) -> float:
    """Wang 2022, table 2."""
    depth = config.num_hidden_layers
    if config.family != "encoder_decoder":
        return (2 * depth) ** (1 / 4)
    return (
        0.81 * (config.encoder_model.num_hidden_layers**4 * depth) ** (1 / 16)
        if encoder
        else (3 * depth) ** (1 / 4)
    )


def place(documents: list[int], t: int) -> int:
    """How many tokens of the same document stand directly before token t."""
    count = 0
    while count < t and documents[t - count - 1] == documents[t]:
        count += 1
    return count


def added_position(
    config: ModelConfig, p: Parameters, prefix: str, position: int
) -> Tensor | float:
    kind: Any = config.position
    if kind.kind == "learned":
        return p[f"{prefix}positions.weight"][position + kind.offset]
    if kind.kind != "sinusoidal":
        return 0.0
    pairs = [
        position / 10000 ** (2 * i / config.hidden_size) for i in range(config.hidden_size // 2)
    ]
    if kind.arrangement == "halves":
        return torch.tensor(
            [math.sin(a) for a in pairs] + [math.cos(a) for a in pairs], dtype=torch.float64
        )
    return torch.tensor([f(a) for a in pairs for f in (math.sin, math.cos)], dtype=torch.float64)


def headed(config: ModelConfig, p: Parameters, x: Vectors) -> Tensor:
    head: Any = config.head
    if head.kind == "features":
        return torch.stack(x)
    if head.kind == "classification":
        return apply_linear(p, "classifier", torch.tanh(apply_linear(p, "pooler", x[0])))
    if head.kind == "mlm":
        inner = [apply_activation(head.activation, apply_linear(p, "head.dense", one)) for one in x]
        x = [apply_norm(config, p, "head.norm", one) for one in inner]
    elif head.scale != 1.0:
        x = [
            one * (config.hidden_size**-0.5 if isinstance(head.scale, str) else head.scale)
            for one in x
        ]
    weight = p["embed.weight"] if config.tie_word_embeddings else p["head.weight"]
    logits = torch.stack([weight @ one for one in x])
    for name in ("head.bias", "head.fixed_bias_V"):
        logits = logits + p.get(name, 0.0)
    cap = None if head.kind == "mlm" else head.softcap
    return logits if cap is None else cap * torch.tanh(logits / cap)
