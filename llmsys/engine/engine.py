"""The engine protocol: forward, backward, clipping and the optimizer step of one model. The trainer
knows only this.

Invariants:
- Losses and gradients are sums over all ranks, divided once by the global number of targets,
  whatever averaging the library does.
- The state is logical: another engine can load it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from llmsys.data.batch import Batch, TokenCounts
from llmsys.model.output_head import NextSentenceHead
from llmsys.model.transformer import Transformer
from llmsys.parallel.fsdp import reshard_parameters
from llmsys.parallel.process_group import all_reduce_sum


class Loss(Protocol):
    """The loss at the head of a model."""

    def __call__(
        self,
        head: nn.Module | None,
        hidden_BTD: Tensor,
        targets_BT: Tensor,
        losses_BT: Tensor | None = None,
        /,
    ) -> Tensor:
        """Sum the loss over all valid targets.

        Args:
            head: The output head; None: `hidden_BTD` holds logits.
            hidden_BTD: The last states.
            targets_BT: Targets, or IGNORED.
            losses_BT: float32 zeros, filled with the loss of each target.

        Returns:
            The sum in nats, with autograd.
        """
        ...


# (loss in nats per target, gradient norm before clipping) → whether the step may change the
# weights. Every rank calls it with the same numbers, so every rank gets the same answer.
Accept = Callable[[float, float], bool]


# (gradients by parameter name, loss scale that they contain), before clipping: DTensors, and plain
# tensors that every rank has. Every rank calls it.
ObserveGradients = Callable[[Mapping[str, Tensor], float], None]


@dataclass(frozen=True)
class GradientProbe:
    """A look at the gradients of the first micro-batches of a step.

    Attributes:
        count: Micro-batches of this rank, equally many on every rank.
        look: Called once when their gradients, and no others, have been summed over ranks. Every
            rank calls it.
    """

    count: int
    look: Callable[[], None]


def accept_all(loss: float, gradient_norm: float) -> bool:
    """Accept every step: the default `Accept`."""
    return True


@dataclass(frozen=True)
class StepResult:
    """The result of one step, the same on all ranks.

    Attributes:
        loss: Nats per target.
        gradient_norm: Before clipping.
        targets: Number of targets with a loss.
        is_applied: False for a skipped step: weights, moments and step counter are unchanged.
        extras: Sums over ranks of the `extras` of the call.
        absent: Parameters of this rank that had no gradient in any micro-batch; they only decay.
            Each rank has its own.
    """

    loss: float
    gradient_norm: float
    targets: int
    is_applied: bool = True
    extras: tuple[float, ...] = ()
    absent: tuple[str, ...] = ()


@dataclass
class EngineState:
    """Training state that any engine can load: tensors by name, and the number of steps taken.

    Names: `parameter/NAME` (float32 master), `first_moment/NAME`, `second_moment/NAME`,
    `buffer/NAME`, in fp16 `loss_scale`, which may be missing, and with a schedule-free optimizer
    `average_weights`. Sharded tensors are DTensors, so that another layout can load them.
    """

    tensors: dict[str, Tensor]
    steps: int


class Engine(Protocol):
    """Training and evaluation of one model on the ranks of the process group."""

    observe_gradients: ObserveGradients | None
    """Called with the gradients of each step before they are clipped."""

    @property
    def device(self) -> torch.device:
        """Device of batches."""
        ...

    @property
    def module(self) -> Transformer:
        """The model: expert counters, buffers, names."""
        ...

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Take one optimizer step: forward and backward over this rank's micro-batches, clip,
        update. Collective.

        Args:
            batches: Micro-batches of this rank.
            learning_rate: The rate of the step; a `LearningRate` also holds the share of weight
                decay.
            accept: Called with loss and gradient norm before a weight changes. False skips the
                step.
            extras: Numbers of this rank, equally many on every rank, that are summed over ranks
                along with the loss.

        Returns:
            Loss, norm and sums, the same on all ranks.
        """
        ...

    def compute_logits(self, batch: Batch) -> Tensor | None:
        """Run the model on a batch, without dropout or gradients. Collective.

        Args:
            batch: The batch.

        Returns:
            The model's output, such as logits (B, T, V). None on ranks of a pipeline without its
            last stage.
        """
        ...

    def get_state(self) -> EngineState:
        """Return the training state: tensors by name, sharded ones as DTensors. Collective.

        Returns:
            The live state; its tensors may be those of the optimizer, so copy what must not
            change.
        """
        ...

    def load_state(self, state: EngineState) -> None:
        """Load a training state. Collective.

        Args:
            state: A state of `get_state` whose tensors were filled from a checkpoint.
        """
        ...


class RepeatingEngine(Protocol):
    """An engine that can compute the gradients of a step and drop them."""

    @property
    def module(self) -> Transformer:
        """The model."""
        ...

    def repeat_gradients(self, batches: Sequence[Batch], data_rank: int) -> None:
        """Run forward and backward of a step as another data-parallel rank does, and drop the
        gradients. Collective.

        Args:
            batches: Micro-batches of that rank.
            data_rank: Its number, which decides the dropout.
        """
        ...


def enter_training(module: Transformer) -> None:
    """Make a model ready for the gradients of a step, whatever ran on it before.

    Every engine with FSDP2 begins its gradients here and nowhere else: lists of parameters that are
    made later in the step are then those of the masters.

    Args:
        module: The model.
    """
    module.train()
    reshard_parameters(module)


def drop_counts(module: Transformer) -> None:
    """Reset the counters of experts, depths and heads, as if there had been no forward pass since
    the last step.

    Args:
        module: The model.
    """
    for layer in module.list_auxiliary_layers():
        layer.reset_counts()
    if isinstance(head := getattr(module, "next_sentence", None), NextSentenceHead):
        head.reset_buffers()


def reduce_token_counts(batches: Sequence[Batch], device: torch.device) -> Tensor:
    """Count what the losses of a step are divided by, over all ranks. Collective.

    Args:
        batches: Micro-batches of this rank.
        device: Device of this rank.

    Returns:
        float32 (4,), exact up to 16 million: valid targets, real tokens, real source tokens,
        labelled pairs. Losses are divided by the first. Auxiliary losses are divided by the
        tokens that a layer sees: the third in the encoder of an encoder-decoder, otherwise the
        second. The next-sentence loss is divided by the fourth.
    """
    # A rank whose rows another one counts has no batches here.
    counts = [batch.token_counts for batch in batches]
    sums = [float(sum(column)) for column in zip(*counts, strict=True)] or [0.0] * len(
        TokenCounts._fields
    )
    return all_reduce_sum(_copy_to_device(sums, device)).clamp_(min=1)


class StepNumbers(NamedTuple):
    """The numbers of a step that the host needs; see `StepResult`. `gradient_norm` is NaN where
    none was given.
    """

    loss: float
    gradient_norm: float
    targets: int
    extras: tuple[float, ...]


def reduce_step_numbers(
    nats: Tensor, counts: Tensor, extras: Sequence[float], norm: Tensor | None = None
) -> StepNumbers:
    """Sum the loss and `extras` over all ranks in one reduction, and read all numbers at once.
    Collective.

    This is the one place where the host waits for the device in a step.

    Args:
        nats: Loss of this rank's targets, a scalar tensor.
        counts: Counts of the step, see `reduce_token_counts`.
        extras: Numbers of this rank.
        norm: Gradient norm over all ranks, a scalar tensor.

    Returns:
        The numbers, equal on all ranks.
    """
    sums = all_reduce_sum(
        torch.cat([nats.detach().float().view(1), _copy_to_device(extras, nats.device)])
    )
    norm = torch.full_like(counts[0], torch.nan) if norm is None else norm.float()
    loss, norm_, targets, *summed = torch.cat(
        [torch.stack([sums[0] / counts[0], norm, counts[0]]), sums[1:]]
    ).tolist()
    return StepNumbers(loss, norm_, int(targets), tuple(summed))


def _copy_to_device(numbers: Sequence[float], device: torch.device) -> Tensor:
    # `torch.tensor(..., device=)` would wait until the device has copied.
    return torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)


def iter_persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the training state, such as the balance bias; the others can be
    recomputed.

    Args:
        module: The model.

    Yields:
        Name and buffer, not copied.
    """
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer
