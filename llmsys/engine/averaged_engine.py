"""An engine that also keeps an exponential mean of its weights, and evaluates, continues and saves with it.

Wraps any engine whose `state` gives the living shards. Each step moves the mean towards the weights by
1 - 0.5^(tokens / half-life) (Polyak and Juditsky 1992; the exponential form as in Kingma 2014, section 7.2), so the
batch size does not change how much text it remembers. Every operation rounds once per element: no layout changes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.data.batch import Batch
from llmsys.engine.engine import Accept, Engine, LogicalState, StepResult, always
from llmsys.model.transformer import Transformer

PARAMETER, AVERAGE = "parameter/", "average/"


class AveragedEngine:
    """See the file. `half_life_tokens` counts training targets: after so many a step counts half."""

    def __init__(self, engine: Engine, half_life_tokens: int) -> None:
        self._engine = engine
        self._half_life = half_life_tokens
        self._swapped = False
        self._averages = {name: weights.clone() for name, weights in self._weights().items()}

    @property
    def device(self) -> torch.device:
        """See Engine."""
        return self._engine.device

    @property
    def module(self) -> Transformer:
        """See Engine. After an evaluation it has the mean, until the next step."""
        return self._engine.module

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = always, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine."""
        self._swap(wanted=False)
        result = self._engine.train_step(batches, learning_rate, accept, extras)
        if result.applied:
            self._move(0.5 ** (result.targets / self._half_life))
        return result

    def logits(self, batch: Batch) -> Tensor:
        """See Engine: of the mean."""
        self._swap(wanted=True)
        return self._engine.logits(batch)

    def state(self) -> LogicalState:
        """See Engine. The mean is `average/NAME`."""
        self._swap(wanted=False)
        state = self._engine.state()
        means = {name.replace(PARAMETER, AVERAGE, 1): mean for name, mean in self._averages.items()}
        return LogicalState(state.tensors | means, state.steps)

    def load(self, state: LogicalState) -> None:
        """See Engine. Before the first step the mean is the weights themselves, wherever those came from."""
        self._swap(wanted=False)
        rest = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(AVERAGE)}
        self._engine.load(LogicalState(rest, state.steps))
        weights = self._weights()
        for name, mean in self._averages.items():
            loaded = state.tensors[name.replace(PARAMETER, AVERAGE, 1)] if state.steps else weights[name]
            if loaded is not mean:
                mean.copy_(loaded)

    def _weights(self) -> dict[str, Tensor]:
        tensors = self._engine.state().tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith(PARAMETER)}

    @torch.no_grad()
    def _move(self, kept: float) -> None:
        weights = self._weights()
        for name, mean in self._averages.items():
            local = _local(mean)
            local.mul_(kept)
            local.add_(_local(weights[name]) * (1 - kept))

    @torch.no_grad()
    def _swap(self, *, wanted: bool) -> None:
        """Have the mean in the model's parameters, or the weights: contents change places, one tensor at a time."""
        if wanted == self._swapped:
            return
        weights = self._weights()
        for name, mean in self._averages.items():
            here, there = _local(weights[name]), _local(mean)
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        self._swapped = wanted


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
