"""Engine: who owns forward, backward, clipping and the optimizer step.

The trainer knows only this protocol. An engine promises that losses and gradients are sums over all ranks divided
once by the global number of targets, whatever averaging its library does, and that it can give and take the logical
training state, so that a run may go on under another engine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from llmsys.data.batch import Batch
from llmsys.model.transformer import Transformer
from llmsys.parallel.process_group import all_reduce_sum

Loss = Callable[[nn.Module | None, Tensor, Tensor], Tensor]
"""(head, hidden_BTD, targets_BT) → the loss summed over all valid targets; without a head, logits for hidden states."""


Accept = Callable[[float, float], bool]
"""(loss in nats per target, gradient norm before clipping) → whether the step may change the weights.

Every rank asks with the same numbers, so every rank gets the same answer.
"""


def accept_all(loss: float, gradient_norm: float) -> bool:
    """The `Accept` that refuses nothing."""
    return True


@dataclass(frozen=True)
class StepResult:
    """One step, the same on all ranks.

    Attributes:
        loss: nats per target.
        gradient_norm: before clipping.
        targets: how many counted.
        applied: false where `accept` refused: weights, moments and the count of steps are as they were.
        extras: the sums over ranks of what was handed in as `extras`.
    """

    loss: float
    gradient_norm: float
    targets: int
    is_applied: bool = True
    extras: tuple[float, ...] = ()


@dataclass
class EngineState:
    """Everything an engine must give to continue elsewhere: tensors by name, and the number of steps taken.

    Names: `parameter/NAME` (fp32 master), `first_moment/NAME`, `second_moment/NAME`, `buffer/NAME`, and in fp16
    `loss_scale`, which may be missing. Sharded ones are DTensors, so that they can be saved from one layout and loaded
    into another.
    """

    tensors: dict[str, Tensor]
    steps: int


class Engine(Protocol):
    """Trains and evaluates one model on the ranks that have joined."""

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        ...

    @property
    def module(self) -> Transformer:
        """The model, for what is not a forward pass: expert counts, buffers, names."""
        ...

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = accept_all, extras: Sequence[float] = ()
    ) -> StepResult:
        """Forward and backward over this rank's micro-batches, clip, and step unless `accept` refuses.

        `extras` are numbers of this rank's, as many on every rank, that are summed over ranks along with the loss.
        """
        ...

    def compute_logits(self, batch: Batch) -> Tensor:
        """Evaluation: what the model gives for a batch, without dropout. All ranks must call it together."""
        ...

    def get_state(self) -> EngineState:
        """The logical training state. Collective."""
        ...

    def load_state(self, state: EngineState) -> None:
        """Take over a state whose tensors were filled from a checkpoint. Collective."""
        ...


def reduce_token_counts(batches: Sequence[Batch], device: torch.device) -> Tensor:
    """Valid targets, real tokens and real source tokens of a step, over all ranks, float32 of shape (3,). Collective.

    Losses are divided by the first, the auxiliary losses of layers by the tokens that those layers see: the third in
    the encoder of an encoder-decoder, else the second. Exact up to 16 million.
    """
    counts = [(batch.num_valid_targets, batch.num_tokens, batch.num_source_tokens) for batch in batches]
    sums = [float(sum(column)) for column in zip(*counts, strict=True)] or [0.0] * 3
    return all_reduce_sum(torch.tensor(sums, device=device)).clamp_(min=1)


def reduce_sums(nats: Tensor, targets: Tensor, extras: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """(loss in nats per target, sums of `extras`) over all ranks, in one reduction. Collective."""
    sums = all_reduce_sum(torch.cat([nats.detach().float().view(1), nats.new_tensor(extras, dtype=torch.float32)]))
    return float(sums[0] / targets), tuple(sums[1:].tolist())


def iter_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that belong to the training state, such as the balancing bias; the rest can be recomputed."""
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
