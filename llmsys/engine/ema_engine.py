"""An engine that also keeps an exponential mean of its weights, and evaluates, continues and saves with it.

Wraps any engine whose `get_state` gives the living shards. Each step moves the mean towards the weights by
1 - 0.5^(tokens / half-life) (Polyak and Juditsky 1992; the exponential form as in Kingma 2014, section 7.2), so the
batch size does not change how much text it remembers. Every operation rounds once per element: no layout changes it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from llmsys.data.batch import Batch
from llmsys.engine.engine import Accept, Engine, EngineState, StepResult, accept_all
from llmsys.model.transformer import Transformer

PARAMETER, AVERAGE = "parameter/", "average/"


class EmaEngine:
    """See the file. `half_life_tokens` counts training targets: after so many a step counts half."""

    def __init__(self, engine: Engine, half_life_tokens: int) -> None:
        self._engine = engine
        self._half_life = half_life_tokens
        self._swapped = False
        self._averages = {name: weights.clone() for name, weights in self._get_weights().items()}

    @property
    def device(self) -> torch.device:
        """See Engine."""
        return self._engine.device

    @property
    def module(self) -> Transformer:
        """See Engine. After an evaluation it has the mean, until the next step."""
        return self._engine.module

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = accept_all, extras: Sequence[float] = ()
    ) -> StepResult:
        """See Engine."""
        self._swap_weights(wanted=False)
        result = self._engine.train_step(batches, learning_rate, accept, extras)
        if result.is_applied:
            self._update_averages(0.5 ** (result.targets / self._half_life))
        return result

    def compute_logits(self, batch: Batch) -> Tensor:
        """See Engine: of the mean."""
        self._swap_weights(wanted=True)
        return self._engine.compute_logits(batch)

    def get_state(self) -> EngineState:
        """See Engine. The mean is `average/NAME`."""
        self._swap_weights(wanted=False)
        state = self._engine.get_state()
        means = {name.replace(PARAMETER, AVERAGE, 1): mean for name, mean in self._averages.items()}
        return EngineState(state.tensors | means, state.steps)

    def load_state(self, state: EngineState) -> None:
        """See Engine. Before the first step the mean is the weights themselves, wherever those came from."""
        self._swap_weights(wanted=False)
        rest = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(AVERAGE)}
        self._engine.load_state(EngineState(rest, state.steps))
        weights = self._get_weights()
        for name, mean in self._averages.items():
            loaded = state.tensors[name.replace(PARAMETER, AVERAGE, 1)] if state.steps else weights[name]
            if loaded is not mean:
                mean.copy_(loaded)

    def _get_weights(self) -> dict[str, Tensor]:
        tensors = self._engine.get_state().tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith(PARAMETER)}

    @torch.no_grad()
    def _update_averages(self, kept: float) -> None:
        weights = self._get_weights()
        for name, mean in self._averages.items():
            local = _to_local(mean)
            local.mul_(kept)
            local.add_(_to_local(weights[name]) * (1 - kept))

    @torch.no_grad()
    def _swap_weights(self, *, wanted: bool) -> None:
        """Have the mean in the model's parameters, or the weights: contents change places, one tensor at a time."""
        if wanted == self._swapped:
            return
        weights = self._get_weights()
        for name, mean in self._averages.items():
            here, there = _to_local(weights[name]), _to_local(mean)
            kept = here.clone()
            here.copy_(there)
            there.copy_(kept)
        self._swapped = wanted


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
