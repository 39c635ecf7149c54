"""The reference run of parity: one process, eager, fp32, with torch's own loss, clipping and AdamW,
one row at a time.

A single row has no padding, so no count of tokens can depend on the other rows of a batch.

"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.doctor.parity_models import ParityModel
from llmsys.doctor.parity_rows import list_rows
from llmsys.engine.engine import iter_persistent_buffers
from llmsys.model.initialization import initialize_parameters
from llmsys.model.output_head import get_next_sentence_head
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.train.expert_load import update_expert_balance

STEPS, SEED, RATE = 3, 7, 1e-2
# Clips every step. The large epsilon keeps gradients that are zero but for rounding from deciding a
# sign.
OPTIMIZER = AdamWConfig(
    learning_rate=RATE, max_grad_norm=0.5, weight_decay=0.1, embedding_lr_multiplier=2.0, eps=1e-6
)

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Trajectory:
    """A few steps of training.

    Attributes:
        losses: loss of each step in nats per target.
        norms: gradient norm of each step before clipping.
        start: weights before the first step.
        gradients: first moments after one step: a tenth of the clipped gradient, which no engine
            can hide.
        weights: weights at the end.
        moments: both moments at the end, as `1/NAME` and `2/NAME`.
        buffers: further state, such as balancing biases.
    """

    losses: list[float]
    norms: list[float]
    start: Tensors
    gradients: Tensors
    weights: Tensors
    moments: Tensors
    buffers: Tensors


def compute_reference_trajectory(parity_model: ParityModel, steps: int = STEPS) -> Trajectory:
    """Return the trajectory of a parity model in the reference run."""
    model = Transformer(parity_model.model)
    initialize_parameters(model, SEED)
    bias_expert_choice(model, parity_model)
    named = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = _build_adamw(named, model.config)
    losses, norms = [], []
    gradients: Tensors = {}
    for step in range(steps):
        loss = _add_gradients(model, list_rows(parity_model, step))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)))
        optimizer.step()
        optimizer.zero_grad()
        update_expert_balance(model)
        losses.append(loss)
        if step == 0:
            gradients = {
                name: optimizer.state[value]["exp_avg"].clone() for name, value in named.items()
            }
    weights = {name: parameter.detach() for name, parameter in named.items()}
    moments = {f"1/{name}": optimizer.state[value]["exp_avg"] for name, value in named.items()}
    moments |= {f"2/{name}": optimizer.state[value]["exp_avg_sq"] for name, value in named.items()}
    buffers = {name: buffer.clone() for name, buffer in iter_persistent_buffers(model)}
    return Trajectory(losses, norms, start, gradients, weights, moments, buffers)


def _add_gradients(model: Transformer, rows: list[Batch]) -> float:
    """Add the gradients of a step to those of the model; return the loss in nats per target."""
    model.train()
    targets = sum(int((row.targets_BT != IGNORED).sum()) for row in rows)
    tokens = sum(_count_tokens(row.tokens_BT, row.documents_BT) for row in rows)
    source_tokens = sum(_count_tokens(row.source_BS, row.source_documents_BS) for row in rows)
    layers = set(model.list_auxiliary_layers())
    of_source = set() if model.encoder is None else layers & set(model.encoder.modules())
    pairs = max(1, sum(row.token_counts.labelled_pairs for row in rows))
    total = 0.0
    for row in rows:
        logits_BTV = model(**row.to_model_inputs())
        nats = _sum_nats(logits_BTV, row.targets_BT)
        share = (nats + _sum_further_nats(model, row)) / targets
        for layers_of_stack, seen in ((layers - of_source, tokens), (of_source, source_tokens)):
            for layer in layers_of_stack:
                # Auxiliary losses are divided by the tokens of their stack, not by targets.
                share = share + layer.sum_auxiliary_losses() / seen
        if row.next_sentence_B is not None:
            share = share + get_next_sentence_head(model).take_loss() / pairs
        share.backward()
        total += float(nats.detach())
    return total / targets


def _count_tokens(tokens_BT: Tensor | None, documents_BT: Tensor | None) -> int:
    if documents_BT is not None:
        return int((documents_BT >= 0).sum())
    return 0 if tokens_BT is None else tokens_BT.numel()


def _sum_nats(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    logits_NV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    return nn.functional.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum")


def _sum_further_nats(model: Transformer, row: Batch) -> Tensor:
    """Return the loss of the multi-token prediction modules (DeepSeek-V3, arXiv:2412.19437,
    equations 24 and 25).
    """
    config = model.config.multi_token_prediction
    if config is None:
        return torch.zeros(())
    nats = torch.zeros(())
    for k, logits_BTV in enumerate(model.predicted, start=1):
        targets_BT = row.targets_BT[:, k:]
        if row.documents_BT is not None:
            is_other_BT = row.documents_BT[:, k:] != row.documents_BT[:, :-k]
            targets_BT = targets_BT.masked_fill(is_other_BT, IGNORED)
        nats = nats + _sum_nats(logits_BTV, targets_BT)
    return config.weight * nats / config.depth


def _build_adamw(named: dict[str, nn.Parameter], config: ModelConfig) -> torch.optim.AdamW:
    groups = [
        {
            "params": [named[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr": RATE * group.lr_multiplier,
        }
        for group in build_parameter_groups(named.items(), OPTIMIZER, config)
    ]
    # foreach=False: the plain loop of torch is the reference.
    return torch.optim.AdamW(
        groups, lr=RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False
    )


def bias_expert_choice(model: Transformer, parity_model: ParityModel) -> None:
    """Set the balancing biases that give the parity model its routing."""
    with torch.no_grad():
        for layer in model.list_moe_layers():
            for expert, push in parity_model.expert_bias.items():
                layer.balance_bias_E[expert] = push
