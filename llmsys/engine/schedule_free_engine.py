"""An engine whose optimizer trains between its average and its fast weights, and that evaluates with the average.

Wraps any engine whose `get_state` returns the tensors themselves. The average is x = y - (1 - β) / β · (z - y), from
the trained weights y and the optimizer's z - y (Defazio 2024, arXiv:2405.15682, equation 5).

Invariants:
- The weights after an evaluation have the bits of before.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.engine.ema_engine import AVERAGE, PARAMETER
from llmsys.engine.engine import Accept, Engine, EngineState, ObserveGradients, RepeatingEngine, StepResult, accept_all
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.transformer import Transformer

LOOKAHEAD = "lookahead_moment/"


class ScheduleFreeEngine:
    """An engine with a schedule-free optimizer. `beta` is the average's share in the trained weights."""

    def __init__(self, engine: Engine, beta: float) -> None:
        self._engine = engine
        self._factor = (1 - beta) / beta
        self._saved: dict[str, Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device of the wrapped engine."""
        return self._engine.device

    @property
    def module(self) -> Transformer:
        """The model. After an evaluation it holds the average, until the next step."""
        return self._engine.module

    @property
    def observe_gradients(self) -> ObserveGradients | None:
        """Observer of the wrapped engine."""
        return self._engine.observe_gradients

    @observe_gradients.setter
    def observe_gradients(self, observe: ObserveGradients | None) -> None:
        self._engine.observe_gradients = observe

    def train_step(
        self, batches: Sequence[Batch], learning_rate: float, accept: Accept = accept_all, extras: Sequence[float] = ()
    ) -> StepResult:
        """Implement `Engine.train_step`."""
        self._restore_weights()
        return self._engine.train_step(batches, learning_rate, accept, extras)

    def repeat_gradients(self, batches: Sequence[Batch], data_rank: int) -> None:
        """Implement `RepeatingEngine.repeat_gradients` with the weights of the wrapped engine, which implements it."""
        self._restore_weights()
        cast(RepeatingEngine, self._engine).repeat_gradients(batches, data_rank)

    def compute_logits(self, batch: Batch) -> Tensor | None:
        """Implement `Engine.compute_logits` with the average."""
        self._use_average()
        return self._engine.compute_logits(batch)

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. The average is `average/NAME`, a copy for those who use the model."""
        self._restore_weights()
        state = self._engine.get_state()
        return EngineState(state.tensors | self._compute_averages(state.tensors), state.steps)

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state`. The average follows from the rest."""
        self._restore_weights()
        rest = {name: tensor for name, tensor in state.tensors.items() if not name.startswith(AVERAGE)}
        self._engine.load_state(EngineState(rest, state.steps))

    @torch.no_grad()
    def _compute_averages(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        averages: dict[str, Tensor] = {}
        for name, weights in tensors.items():
            if name.startswith(PARAMETER):
                mean = weights.clone()
                lookahead = tensors[name.replace(PARAMETER, LOOKAHEAD, 1)]
                get_local_tensor(mean).sub_(get_local_tensor(lookahead) * self._factor)
                averages[name.replace(PARAMETER, AVERAGE, 1)] = mean
        return averages

    @torch.no_grad()
    def _use_average(self) -> None:
        if self._saved:
            return
        tensors = self._engine.get_state().tensors
        for name, mean in self._compute_averages(tensors).items():
            weights = get_local_tensor(tensors[name.replace(AVERAGE, PARAMETER, 1)])
            self._saved[name.replace(AVERAGE, PARAMETER, 1)] = weights.clone()
            weights.copy_(get_local_tensor(mean))

    @torch.no_grad()
    def _restore_weights(self) -> None:
        if not self._saved:
            return
        tensors = self._engine.get_state().tensors
        for name, saved in self._saved.items():
            get_local_tensor(tensors[name]).copy_(saved)
        self._saved = {}
