"""The mixture-of-experts layer as its formulas say it, one token, expert and assignment at a time.

Takes the layer's parameters by name, so autograd gives their gradients, and uses none of the code
that it checks.
"""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch
from torch import Tensor

from llmsys.config.moe import MoeConfig

Parameters = Mapping[str, Tensor]
Visits = dict[int, Tensor]
"""Of one token: the weight of each expert that it visits."""


def compute_mixture(
    config: MoeConfig, p: Parameters, x: Tensor, real: Tensor, *, training: bool
) -> Tensor:
    """(rows, positions, width) to the same; `real` is False where a token is padding."""
    rows = []
    for row, here in zip(x, real.tolist(), strict=True):
        visits = route(config, p, row, here, training=training)
        rows.append(
            torch.stack(
                [
                    compute_token(config, p, one, weights)
                    for one, weights in zip(row, visits, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def compute_token(config: MoeConfig, p: Parameters, x: Tensor, visits: Visits) -> Tensor:
    y = torch.zeros_like(x)
    for e, weight in visits.items():
        y = y + config.routed_scaling_factor * weight * compute_network(
            config, x, *(part(p, name, e) for name in MAPS)
        )
    if config.shared_expert_size:
        shared = [(p.get(f"shared.{m}_proj.weight"), p.get(f"shared.{m}_proj.bias")) for m in MAPS]
        answer = compute_network(config, x, *((None if w is None else w.T, b) for w, b in shared))
        gate = p.get("shared_gate.weight")
        y = y + (answer if gate is None else answer / (1 + (-(gate[0] @ x)).exp()))
    return y


MAPS = ("gate", "up", "down")
Map = tuple[Tensor | None, Tensor | None]


def part(p: Parameters, name: str, expert: int) -> Map:
    weight, bias = p.get(f"experts.{name}_proj"), p.get(f"experts.{name}_bias")
    return None if weight is None else weight[expert], None if bias is None else bias[expert]


def compute_network(config: MoeConfig, x: Tensor, gate: Map, up: Map, down: Map) -> Tensor:
    def line(x: Tensor, to: Map) -> Tensor:
        return x @ to[0] + (0 if to[1] is None else to[1])

    kind, inner = config.expert, line(x, up)
    if kind.kind == "clamped_swiglu":
        g = line(x, gate)
        g = torch.where(g > kind.limit, torch.full_like(g, kind.limit), g)
        inner = torch.where(inner.abs() > kind.limit, kind.limit * inner.sign(), inner)
        return line((inner + 1) * g / (1 + (-kind.alpha * g).exp()), down)
    if kind.kind == "swiglu":
        g = line(x, gate)
        return line(g / (1 + (-g).exp()) * inner, down)
    if kind.kind == "geglu":
        g = line(x, gate)
        return line(g * (1 + torch.erf(g / math.sqrt(2))) / 2 * inner, down)
    assert kind.kind == "relu"
    return line(inner.clamp(min=0), down)


def compute_scores(config: MoeConfig, p: Parameters, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = p["router.weight"] @ x + p.get("router.bias", 0)
    if config.score == "sigmoid":
        return logits, 1 / (1 + (-logits).exp())
    return logits, logits.exp() / logits.exp().sum()


def route(
    config: MoeConfig, p: Parameters, row: Tensor, real: list[bool], *, training: bool
) -> list[Visits]:
    tokens, size = sum(real), config.num_experts
    if config.routing.kind == "expert_choice":
        return select_expert_choice(
            config, p, row, real, math.ceil(Fraction(str(config.routing.factor)) * tokens / size)
        )
    wanted = [choose(config, p, x) for x in row]
    if config.routing.kind == "token_choice" or not training:
        return wanted
    room = math.ceil(
        Fraction(str(config.routing.factor)) * tokens * config.num_experts_per_tok / size
    )
    taken = [0] * size
    kept: list[dict[int, Tensor]] = []
    for visits, here in zip(wanted, real, strict=True):
        kept.append({})
        for e, weight in visits.items():
            if here and taken[e] < room:
                taken[e] += 1
                kept[-1][e] = weight
    return kept


def select_expert_choice(
    config: MoeConfig, p: Parameters, row: Tensor, real: list[bool], room: int
) -> list[Visits]:
    all_scores = [compute_scores(config, p, x)[1] for x in row]
    here = [t for t, is_real in enumerate(real) if is_real]
    visits: list[Visits] = [{} for _ in row]
    # float32 rounds scores close to 1 into ties.
    finer = {name: value.detach().double() for name, value in p.items()}
    merits = [compute_scores(config, finer, x.detach().double())[1].tolist() for x in row]
    for e in range(config.num_experts):
        for t in sorted(here, key=lambda t: -merits[t][e])[:room]:
            visits[t][e] = all_scores[t][e]
    return visits


def choose(config: MoeConfig, p: Parameters, x: Tensor) -> Visits:
    """The experts of one token, best first."""
    logits, score = compute_scores(config, p, x)
    merit = [float(s.detach()) for s in score]
    if config.balance.kind == "bias":
        merit = [m + float(b) for m, b in zip(merit, p["balance_bias_E"], strict=True)]
    allowed = [
        e
        for e in range(config.num_experts)
        if config.groups is None or e in open_experts(config, merit)
    ]
    if config.score == "sparsemixer":
        return select_sparsemixer(config, logits, merit, allowed)
    chosen = sorted(allowed, key=lambda e: -merit[e])[: config.num_experts_per_tok]
    total = sum(score[e] for e in chosen) if config.norm_topk_prob else 1.0
    return {e: score[e] / total for e in chosen}


def open_experts(config: MoeConfig, merit: list[float]) -> list[int]:
    assert config.groups is not None
    size = config.num_experts // config.groups.num_groups
    members = [list(range(g * size, (g + 1) * size)) for g in range(config.groups.num_groups)]
    best = 1 if config.groups.score == "max" else 2
    worth = [sum(sorted((merit[e] for e in group), reverse=True)[:best]) for group in members]
    order = sorted(range(len(members)), key=lambda g: -worth[g])
    return [e for g in order[: config.groups.groups_per_token] for e in members[g]]


def select_sparsemixer(
    config: MoeConfig, logits: Tensor, merit: list[float], allowed: list[int]
) -> Visits:
    visits: Visits = {}
    for _ in range(2):
        left = [e for e in allowed if e not in visits]
        best = max(left, key=lambda e: merit[e])
        top = float(logits[best].detach())
        values = {e: float(logits[e].detach()) for e in left}
        near = [
            e for e in left if (top - values[e]) / max(abs(values[e]), top) <= 2 * config.jitter
        ]
        visits[best] = logits[best].exp() / sum(logits[e].exp() for e in near)
    return visits


def compute_balance_losses(
    config: MoeConfig, p: Parameters, x: Tensor, share: Tensor | None
) -> Tensor:
    """The auxiliary losses of all rows, a mean over tokens; without padding. `share`: of the
    step before.
    """
    balance, size = config.balance, config.num_experts
    total, tokens = torch.zeros(()), x.shape[0] * x.shape[1]
    for row in x:
        visits = [choose(config, p, one) for one in row]
        count = [sum(e in one for one in visits) for e in range(size)]
        for one in row:
            logits, score = compute_scores(config, p, one)
            total = total + config.z_loss_weight * logits.exp().sum().log() ** 2 / tokens
            share_of_score = score / score.sum()
            if balance.kind == "bias":
                loss = size * sum(count[e] / sum(count) * share_of_score[e] for e in range(size))
                total = total + balance.sequence_weight * loss / tokens
            elif balance.kind == "auxiliary_loss":
                f = (
                    [count[e] / sum(count) for e in range(size)]
                    if share is None
                    else share.tolist()
                )
                total = (
                    total
                    + balance.weight
                    * size
                    * sum(f[e] * share_of_score[e] for e in range(size))
                    / tokens
                )
    return total
