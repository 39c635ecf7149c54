"""Losses of a training step in plain torch: head, multi-token prediction, balancing, router z.

They share no code with the engines: cross entropy is torch's, and what the router asks for is
chosen again from its input. Each is a sum over one row; `plain_step.py` divides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.moe import (
    AuxiliaryLossConfig,
    BiasBalancingConfig,
    ExpertCapacityConfig,
    ExpertChoiceConfig,
    NoBalancingConfig,
    TokenChoiceConfig,
)
from llmsys.config.objective import LossConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.model.moe_layer import MoELayer
from llmsys.model.transformer import Transformer

# Source, epoch and number of a document → its targets in a step, and their loss in nats.
DocumentLosses = dict[tuple[int, int, int], tuple[int, float]]

# B rows (sequences), T positions, N = B * T tokens, E experts


def compute_nats(logits: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    """Return cross entropy, smoothed and with the squared log-sum-exp, of each valid target."""
    logits_NV, targets_N = logits.reshape(-1, logits.shape[-1]), targets.flatten()
    is_valid_N = targets_N != IGNORED
    logits_NV, targets_N = logits_NV[is_valid_N], targets_N[is_valid_N]
    # ε is for the other classes only; torch's label_smoothing gives the true one a share too.
    wrong = config.label_smoothing / max(1, logits_NV.shape[1] - 1)
    target_NV = torch.full_like(logits_NV, wrong)
    target_NV.scatter_(1, targets_N[:, None], 1 - config.label_smoothing)
    nats_N = F.cross_entropy(logits_NV, target_NV, reduction="none")
    return nats_N + config.z_loss * logits_NV.logsumexp(-1).square()


def sum_nats(logits: Tensor, targets: Tensor, config: LossConfig) -> Tensor:
    """Return the losses of all valid targets, summed."""
    if bool((targets == IGNORED).all()):
        return logits.sum() * 0.0
    return compute_nats(logits, targets, config).sum()


def add_document_losses(
    losses: DocumentLosses, row: Batch, logits: Tensor, config: LossConfig
) -> None:
    """Add the losses of one row to its documents; nothing where it names none.

    Args:
        losses: what is added to.
        row: the row.
        logits: the model's, of each position.
        config: the loss.
    """
    if row.target_documents is None:
        return
    nats_N = compute_nats(logits.detach(), row.targets_BT, config).tolist()
    spans_N = row.target_documents.spans_BT[row.targets_BT != IGNORED].tolist()
    named = row.target_documents.sums
    for span, nats in zip(spans_N, nats_N, strict=True):
        numbers = (named.sources_S[span], named.epochs_S[span], named.documents_S[span])
        source, epoch, document = (int(number) for number in numbers)
        before = losses.get((source, epoch, document), (0, 0.0))
        losses[source, epoch, document] = before[0] + 1, before[1] + nats


def sum_further_nats(model: Transformer, row: Batch, config: LossConfig) -> Tensor:
    """Return the loss of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, eq. 24 and 25)."""
    section = model.config.multi_token_prediction
    if section is None:
        return torch.zeros(())
    total = torch.zeros(())
    for ahead, logits in enumerate(model.predicted, start=1):
        targets = row.targets_BT[:, ahead:]
        if row.documents_BT is not None:
            is_other = row.documents_BT[:, ahead:] != row.documents_BT[:, :-ahead]
            targets = targets.masked_fill(is_other, IGNORED)
        total = total + sum_nats(logits[:, : targets.shape[1]], targets, config)
    return section.weight * total / section.depth


@dataclass
class RouterLoad:
    """Losses of one layer in a row, and the assignments that its tokens ask for."""

    loss: Tensor
    tokens_E: Tensor


class RouterWatch:
    """Computes losses and loads of layers with experts from the inputs of their forward passes.

    Args:
        model: the model.
    """

    def __init__(self, model: Transformer) -> None:
        self.layers = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, MoELayer)
        }
        self.balance_factor = 1.0
        self.loads: dict[str, list[RouterLoad]] = {name: [] for name in self.layers}
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(self._build_hook(name), with_kwargs=True)

    def clear(self) -> None:
        """Forget the forward passes so far."""
        for loads in self.loads.values():
            loads.clear()

    def _build_hook(self, name: str) -> Callable[..., None]:
        def look(
            layer: nn.Module, arguments: tuple[Tensor | None, ...], named: dict[str, Tensor | None]
        ) -> None:
            assert isinstance(layer, MoELayer)
            if not layer.training:
                return
            given = dict(zip(("x_BTD", "real_BT", "documents_BT"), arguments, strict=False)) | named
            x_BTD = given["x_BTD"]
            assert x_BTD is not None
            self.loads[name].append(
                self._compute_load(layer, x_BTD, given.get("real_BT"), given.get("documents_BT"))
            )

        return look

    def _compute_load(
        self, layer: MoELayer, x_BTD: Tensor, real_BT: Tensor | None, documents_BT: Tensor | None
    ) -> RouterLoad:
        config = layer.config
        is_real_N = torch.ones(x_BTD.shape[:2], dtype=torch.bool) if real_BT is None else real_BT
        is_real_N = is_real_N.flatten()
        x_ND = x_BTD.flatten(0, 1)
        logits_NE = F.linear(x_ND, layer.router.weight, layer.router.bias)
        # Sigmoid scores are divided by their sum: exp(log s − log Σ s).
        scores_NE = logits_NE.sigmoid() if config.score == "sigmoid" else logits_NE.softmax(-1)
        share_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        rows, positions = x_BTD.shape[:2]
        asked_NE = self._list_assignments(
            layer, logits_NE.detach(), scores_NE.detach(), is_real_N, rows, documents_BT
        )
        tokens_E = asked_NE[is_real_N].sum(0).float()
        # A stage of short sequences has several of them in a micro-batch of one row.
        is_real_BT = is_real_N.view(rows, positions)
        tokens_BE = (asked_NE.view(rows, positions, -1) * is_real_BT[..., None]).sum(1)
        share_BE = (share_NE.view(rows, positions, -1) * is_real_BT[..., None]).sum(1)
        fraction_BE = tokens_BE / tokens_BE.sum(-1, keepdim=True).clamp(min=1)
        loss = logits_NE.new_zeros(())
        match config.balance:
            case BiasBalancingConfig(sequence_weight=weight):
                balance = weight * config.num_experts * (fraction_BE * share_BE).sum()
            case AuxiliaryLossConfig(weight=weight, scope=scope):
                # Over a batch: with the loads of the step before.
                used_BE = layer.expert_share_E if scope == "batch" else fraction_BE
                assert used_BE is not None
                balance = weight * config.num_experts * (used_BE * share_BE).sum()
            case NoBalancingConfig():
                balance = loss
            case unreachable:
                assert_never(unreachable)
        z_loss = config.z_loss_weight * logits_NE[is_real_N].logsumexp(-1).square().sum()
        return RouterLoad(loss + balance * self.balance_factor + z_loss, tokens_E)

    def _list_assignments(
        self,
        layer: MoELayer,
        logits_NE: Tensor,
        scores_NE: Tensor,
        is_real_N: Tensor,
        rows: int,
        documents_BT: Tensor | None,
    ) -> Tensor:
        """Return 1 where a token asks for an expert, before any is dropped, (N, E)."""
        config = layer.config
        match config.routing:
            case TokenChoiceConfig() | ExpertCapacityConfig():
                has_bias = isinstance(config.balance, BiasBalancingConfig)
                wanted_NE = scores_NE + layer.balance_bias_E if has_bias else logits_NE
                if config.groups is not None:
                    merit_NE = wanted_NE if has_bias else scores_NE
                    merit_NGM = merit_NE.unflatten(-1, (config.groups.num_groups, -1))
                    best = 1 if config.groups.score == "max" else 2
                    merit_NG = merit_NGM.topk(best, -1).values.sum(-1)
                    chosen_NG = merit_NG.topk(config.groups.groups_per_token, -1).indices
                    is_open_NG = torch.zeros_like(merit_NG).scatter_(-1, chosen_NG, 1.0)
                    is_open_NE = is_open_NG.repeat_interleave(merit_NGM.shape[-1], -1)
                    wanted_NE = wanted_NE.masked_fill(is_open_NE == 0, -torch.inf)
                experts_NK = wanted_NE.topk(config.num_experts_per_tok, -1).indices
                return torch.zeros_like(scores_NE).scatter_(-1, experts_NK, 1.0)
            case ExpertChoiceConfig(factor=factor, scope=scope):
                asked_NE = torch.zeros_like(scores_NE)
                groups_BT = torch.arange(rows)[:, None].expand(rows, len(is_real_N) // rows)
                if scope == "document" and documents_BT is not None:
                    groups_BT = groups_BT * (int(documents_BT.max()) + 2) + documents_BT
                groups_N = groups_BT.flatten()
                for group in groups_N[is_real_N].unique().tolist():
                    inside = torch.nonzero((groups_N == group) & is_real_N)[:, 0]
                    # 1e-9: a whole number of tokens is not rounded up by its last bit.
                    share = len(inside) * factor / config.num_experts - 1e-9
                    room = min(len(inside), math.ceil(share))
                    for expert in range(config.num_experts):
                        order = scores_NE[inside, expert].argsort(descending=True, stable=True)
                        chosen = order[:room]
                        asked_NE[inside[chosen], expert] = 1.0
                return asked_NE
            case unreachable:
                assert_never(unreachable)
