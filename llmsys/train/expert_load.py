"""Expert load over all ranks: update the balancing bias after each step, and report the balance.

The mean depth of positions that halt by themselves, and the next-sentence loss, are
counted in the same way.

Invariants:
- Sums over tokens are taken in the forward pass, reduced over ranks once per step, and reset.
  Layout and gradient accumulation therefore change no number.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, assert_never

import torch
from torch import Tensor

from llmsys.config.moe import AuxiliaryLossConfig, BiasBalancingConfig, NoBalancingConfig
from llmsys.model.load_balancing import update_balance_bias
from llmsys.model.moe_layer import MoELayer
from llmsys.model.output_head import NextSentenceHead
from llmsys.model.recurrence import AdaptiveRecurrence
from llmsys.model.transformer import Transformer
from llmsys.parallel.process_group import all_reduce_sum

# L layers with experts, E experts


@dataclass(frozen=True)
class ExpertLoadReport:
    """Load of the experts of each layer in one step, over all ranks and micro-batches. Empty for
    dense models.

    Attributes:
        load: share of the layer's assignments that requested each expert, before drops; they sum to
            1.
        entropy: entropy of the load over that of an even one: 1 is even, 0 all on one expert.
        dead: experts that no token requested.
        imbalance: load of the busiest expert over the mean load; 1 is even.
        balance: E * sum_e f_e P_e, the value that a balance loss minimizes; 1 is even.
        router_z: mean over tokens of logsumexp(router logits)².
        dropped: share of the assignments beyond the expert capacity.
    """

    load: list[list[float]]
    entropy: list[float]
    dead: list[int]
    imbalance: list[float]
    balance: list[float]
    router_z: list[float]
    dropped: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Return a list per number with one entry per layer, `busiest` (worst imbalance) and the
        sum `dead_experts`.
        """
        return asdict(self) | {
            "busiest": max(self.imbalance, default=0.0),
            "dead_experts": sum(self.dead),
        }


def set_balance_factor(model: Transformer, factor: float) -> None:
    """Multiply the rates and weights of load balancing in all layers.

    Args:
        model: the model; nothing happens without experts.
        factor: the factor of this step, from `compute_balance_factor`.
    """
    for layer in model.list_moe_layers():
        layer.balance_factor = factor


@dataclass(frozen=True)
class ExpertLoad:
    """Sums of one step on the device. They are read, which makes the host wait, when a report is
    asked for.

    Attributes:
        sums_LS: per layer the tokens of each expert, the sums of its probabilities, and three
            scalars, float64; None for dense models.
    """

    sums_LS: Tensor | None

    def __bool__(self) -> bool:
        """Return whether the model has experts."""
        return self.sums_LS is not None

    def list_idle_layers(self) -> list[int]:
        """List the numbers of the layers whose experts no token requested; the host waits once."""
        if self.sums_LS is None:
            return []
        tokens_LE = _split_sums(self.sums_LS)[0]
        return (tokens_LE.sum(1) == 0).nonzero().flatten().tolist()

    def to_dict(self) -> dict[str, Any]:
        """Return `ExpertLoadReport.to_dict()`."""
        return self.read_report().to_dict()

    def read_report(self) -> ExpertLoadReport:
        """Return the report; the host waits once."""
        if self.sums_LS is None:
            return ExpertLoadReport([], [], [], [], [], [], [])
        tokens_LE, probability_LE, (z_L, tokens_L, dropped_L) = _split_sums(self.sums_LS)
        num_experts = tokens_LE.shape[1]
        tokens_L = tokens_L.clamp(min=1)
        share_LE = _compute_shares(tokens_LE)
        numbers_L = [
            # The entropy of one expert would be divided by log 1 = 0.
            torch.special.entr(share_LE).sum(1) / math.log(max(num_experts, 2)),
            (tokens_LE == 0).sum(1),
            num_experts * share_LE.amax(1),
            num_experts * (share_LE * probability_LE / tokens_L[:, None]).sum(1),
            z_L / tokens_L,
            dropped_L / tokens_LE.sum(1).clamp(min=1),
        ]
        rows = torch.cat([torch.stack(numbers_L), share_LE.T]).tolist()
        entropy, dead, imbalance, balance, router_z, dropped, *shares = rows
        load = [list(share) for share in zip(*shares, strict=True)]
        return ExpertLoadReport(
            load, entropy, [int(count) for count in dead], imbalance, balance, router_z, dropped
        )


@torch.no_grad()
def update_expert_balance(model: Transformer, applied: bool = True) -> ExpertLoad:
    """Update the balancing biases from the load of one step, and reset the counts. Collective; the
    host waits nowhere.

    The bias moves by the sign rule of DeepSeek-V3 (arXiv:2412.19437, 2.1.2).

    Args:
        model: the model.
        applied: whether the optimizer step was applied. A skipped step updates no bias.

    Returns:
        The load over all ranks, for a report; empty for dense models.
    """
    if not model.num_moe_layers or model.config.moe is None:
        return ExpertLoad(None)
    layers = model.list_moe_layers()
    # Layers of other pipeline stages add zeros. float64 holds every count that sums of float32 can
    # reach.
    zeros_S = torch.zeros(
        2 * model.config.moe.num_experts + 3, device=next(model.parameters()).device
    )
    found = {layer.number: _stack_layer_sums(layer) for layer in layers}
    sums_LS = all_reduce_sum(
        torch.stack([found.get(n, zeros_S) for n in range(model.num_moe_layers)]).double()
    )
    tokens_LE = _split_sums(sums_LS)[0]
    share_LE = _compute_shares(tokens_LE)
    for layer in layers:
        if applied:
            _update_layer_balance(layer, tokens_LE[layer.number], share_LE[layer.number])
        layer.reset_counts()
    return ExpertLoad(sums_LS)


@torch.no_grad()
def measure_mean_depth(model: Transformer) -> dict[str, Tensor]:
    """Return the mean steps of a position in this step, over all ranks, and reset the counts.
    Collective.

    Args:
        model: the model.

    Returns:
        `mean_depth` of the decoder or of the only stack, and `encoder_mean_depth`, as far as
        positions halt by themselves; scalars on the device. Empty for other models.
    """
    stacks = {"mean_depth": model.recurrence}
    if model.encoder is not None:
        stacks["encoder_mean_depth"] = model.encoder.recurrence
    layers = {
        name: layer for name, layer in stacks.items() if isinstance(layer, AdaptiveRecurrence)
    }
    if not layers:
        return {}
    sums_L2 = all_reduce_sum(
        torch.stack([torch.stack(layer.get_step_counters()) for layer in layers.values()]).double()
    )
    for layer in layers.values():
        layer.reset_counts()
    return dict(zip(layers, sums_L2[:, 0] / sums_L2[:, 1].clamp(min=1), strict=True))


@torch.no_grad()
def measure_indexer_loss(model: Transformer) -> dict[str, Tensor]:
    """Return the mean loss of the indexers of sparse attention in this step, over all ranks, and
    reset the counts. Collective.

    Args:
        model: the model.

    Returns:
        `indexer_loss` in nats, a mean over layers and tokens without its weight, a scalar on the
        device; empty for other models.
    """
    attention = model.config.attention
    if attention.kind != "latent" or attention.sparse is None:
        return {}
    # A stage of a pipeline may have none.
    zeros_2 = torch.zeros(2, device=next(model.parameters()).device)
    counted = [torch.stack(one.get_step_counters()) for one in model.list_indexers()]
    total, tokens = all_reduce_sum(torch.stack([zeros_2, *counted]).double().sum(0))
    for indexer in model.list_indexers():
        indexer.reset_counts()
    return {"indexer_loss": total / tokens.clamp(min=1)}


@torch.no_grad()
def measure_next_sentence(model: Transformer) -> dict[str, Tensor]:
    """Return loss and accuracy of the next-sentence head in this step over all ranks, and reset
    them. Collective.

    Args:
        model: the model.

    Returns:
        `next_sentence_loss` in nats per row and `next_sentence_accuracy`, scalars on the device;
        empty without a head.
    """
    head = getattr(model, "next_sentence", None)
    if not isinstance(head, NextSentenceHead):
        return {}
    nats, correct, pairs = all_reduce_sum(torch.stack(head.get_step_counters()).double())
    head.reset_buffers()
    return {
        "next_sentence_loss": nats / pairs.clamp(min=1),
        "next_sentence_accuracy": correct / pairs.clamp(min=1),
    }


def measure_heldout_next_sentence(model: Transformer, objective: str) -> dict[str, float]:
    """Return the same of the evaluation that has just ended, as numbers. Collective.

    Args:
        model: the model.
        objective: kind of the objective; others than `masked_next_sentence` have no labels.

    Returns:
        The numbers by name; empty for other objectives.
    """
    if objective != "masked_next_sentence":
        return {}
    return {name: float(value) for name, value in measure_next_sentence(model).items()}


def _split_sums(sums_LS: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return tokens and probabilities of each expert, (L, E), and the scalars (L,) of
    `_stack_layer_sums`.
    """
    num_experts = (sums_LS.shape[1] - 3) // 2
    return sums_LS[:, :num_experts], sums_LS[:, num_experts:-3], sums_LS[:, -3:].unbind(1)


def _compute_shares(tokens_LE: Tensor) -> Tensor:
    # At least 1: a layer without tokens has zeros, not NaN.
    return tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1)


def _stack_layer_sums(layer: MoELayer) -> Tensor:
    scalars = torch.stack([layer.router_z_sum, layer.num_tokens, layer.num_dropped])
    return torch.cat([layer.expert_tokens_E, layer.probability_sum_E, scalars])


def _update_layer_balance(layer: MoELayer, tokens_E: Tensor, share_E: Tensor) -> None:
    match layer.config.balance:
        case BiasBalancingConfig() as balance:
            rate = balance.rate * layer.balance_factor
            layer.balance_bias_E.copy_(update_balance_bias(layer.balance_bias_E, tokens_E, rate))
        case AuxiliaryLossConfig() | NoBalancingConfig():
            pass  # an auxiliary loss acts through the gradients
        case unreachable:
            assert_never(unreachable)
    if layer.expert_share_E is not None:
        # The batch loss of the next step uses the shares of this one, if anybody was asked.
        layer.expert_share_E.copy_(torch.where(tokens_E.any(), share_E, layer.expert_share_E))
