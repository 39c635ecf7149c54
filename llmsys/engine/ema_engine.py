"""An engine that keeps an exponential moving average (EMA) of its weights, and evaluates with it.

Each step moves the average towards the weights by 1 - 0.5^(tokens / half-life), so the batch size
does not change how much text it covers (Polyak and Juditsky 1992; the exponential form as in Kingma
2014, section 7.2).

Invariants:
- Every operation rounds once per element: no layout changes the average.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.engine.averaging_engine import AVERAGE, PARAMETER, AveragingEngine
from llmsys.engine.engine import Accept, Engine, EngineState, StepResult, accept_all
from llmsys.model.local_tensor import get_local_tensor


class EmaEngine(AveragingEngine):
    """An engine with an EMA of its weights. `half_life_tokens` counts training targets."""

    def __init__(self, engine: Engine, half_life_tokens: int) -> None:
        """Begin the average with the present weights.

        Args:
            engine: Trains the weights. Its `get_state` must return the tensors themselves.
            half_life_tokens: Training targets, over all ranks, after which a weight has half its
                share.
        """
        super().__init__(engine)
        self._half_life = half_life_tokens
        self._swapped = False
        self._averages = {name: weights.clone() for name, weights in self._get_weights().items()}

    def train_step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Implement `Engine.train_step`, and update the average if the step is applied."""
        result = super().train_step(batches, learning_rate, accept, extras)
        if result.is_applied:
            self._update_averages(0.5 ** (result.targets / self._half_life))
        return result

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`. Before the first step the average equals the weights."""
        super().load_state(state)
        weights = self._get_weights()
        for name, mean in self._averages.items():
            loaded = (
                state.tensors[name.replace(PARAMETER, AVERAGE, 1)] if state.steps else weights[name]
            )
            if loaded is not mean:
                mean.copy_(loaded)

    def _get_averages(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace(PARAMETER, AVERAGE, 1): mean for name, mean in self._averages.items()}

    def _use_average(self) -> None:
        self._swap_weights(wanted=True)

    def _use_weights(self) -> None:
        self._swap_weights(wanted=False)

    def _get_weights(self) -> dict[str, Tensor]:
        tensors = self._engine.get_state().tensors
        return {name: tensor for name, tensor in tensors.items() if name.startswith(PARAMETER)}

    @torch.no_grad()
    def _update_averages(self, decay: float) -> None:
        weights = self._get_weights()
        for name, mean in self._averages.items():
            local = get_local_tensor(mean)
            # Two operations: lerp_ may fuse multiply and add, and round differently on another
            # device or layout.
            local.mul_(decay)
            local.add_(get_local_tensor(weights[name]) * (1 - decay))

    @torch.no_grad()
    def _swap_weights(self, *, wanted: bool) -> None:
        """Swap weights and average in the model, one tensor at a time, so that it holds the
        `wanted` one.
        """
        if wanted == self._swapped:
            return
        weights = self._get_weights()
        for name, mean in self._averages.items():
            here = get_local_tensor(weights[name])
            there = get_local_tensor(mean)
            saved = here.clone()
            here.copy_(there)
            there.copy_(saved)
        self._swapped = wanted
