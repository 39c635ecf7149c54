"""The oracle of parity: one process, eager, fp32, torch's own loss, clip and AdamW, all rows of a step in one batch."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmsys.config.optimizer import AdamW
from llmsys.doctor.subjects import SEQUENCES, Subject, batch_of
from llmsys.engine.engine import saved_buffers
from llmsys.model.init import initialize
from llmsys.model.transformer import Transformer
from llmsys.optim.groups import parameter_groups
from llmsys.train.balance import settle_experts

STEPS, SEED, RATE = 3, 7, 1e-2
OPTIMIZER = AdamW(learning_rate=RATE, gradient_clip=0.5, weight_decay=0.1, embedding_rate_scale=2.0, eps=1e-6)
"""Clips every step; its epsilon keeps gradients that are zero but for rounding from deciding a sign."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Trajectory:
    """A few steps: losses, norms before clipping, weights at the start and the end, gradients of the first step.

    `gradients` are first moments after one step: a tenth of the clipped gradient, which no engine can hide. `moments`
    are both moments at the end, `buffers` what else belongs to the state, such as balancing biases.
    """

    losses: list[float]
    norms: list[float]
    start: Tensors
    gradients: Tensors
    weights: Tensors
    moments: Tensors
    buffers: Tensors


def oracle(subject: Subject) -> Trajectory:
    """The specified trajectory of a subject."""
    model = Transformer(subject.model)
    initialize(model, SEED)
    push_experts(model, subject)
    named = dict(model.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = _adamw(named)
    losses, norms = [], []
    gradients: Tensors = {}
    for step in range(STEPS):
        loss = _loss(model, step)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.gradient_clip)))
        optimizer.step()
        optimizer.zero_grad()
        settle_experts(model)
        losses.append(loss.item())
        if step == 0:
            gradients = {name: optimizer.state[value]["exp_avg"].clone() for name, value in named.items()}
    weights = {name: parameter.detach() for name, parameter in named.items()}
    moments = {f"1/{name}": optimizer.state[value]["exp_avg"] for name, value in named.items()}
    moments |= {f"2/{name}": optimizer.state[value]["exp_avg_sq"] for name, value in named.items()}
    buffers = {name: buffer.clone() for name, buffer in saved_buffers(model)}
    return Trajectory(losses, norms, start, gradients, weights, moments, buffers)


def _loss(model: Transformer, step: int) -> Tensor:
    batch = batch_of(step, range(SEQUENCES))
    model.train()
    logits_BTV = model(**batch.inputs())
    total = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch.targets_BT.flatten(), reduction="sum")
    return total / batch.valid_targets


def _adamw(named: dict[str, nn.Parameter]) -> torch.optim.AdamW:
    groups = [
        {
            "params": [named[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr": RATE * group.rate_scale,
        }
        for group in parameter_groups(named.items(), OPTIMIZER)
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, foreach=False)


def push_experts(model: Transformer, subject: Subject) -> None:
    """Set the balancing biases that make the routing of a subject what its name says."""
    with torch.no_grad():
        for layer in model.moe_layers():
            for expert, push in subject.pushed.items():
                layer.balance_bias_E[expert] = push
