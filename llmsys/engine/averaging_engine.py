"""An engine around another one that trains its weights and evaluates with an average of them.

The wrapped engine's `get_state` must return the tensors themselves.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.engine.engine import (
    Accept,
    Engine,
    EngineState,
    ObserveGradients,
    RepeatingEngine,
    StepResult,
    accept_all,
)
from llmsys.model.transformer import Transformer

PARAMETER = "parameter/"
AVERAGE = "average/"


class AveragingEngine(ABC):
    """The wrapped engine, with the trained weights in its model for steps and the average for
    evaluations.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

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
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        accept: Accept = accept_all,
        extras: Sequence[float] = (),
    ) -> StepResult:
        """Implement `Engine.train_step`."""
        self._use_weights()
        return self._engine.train_step(batches, learning_rate, accept, extras)

    def repeat_gradients(self, batches: Sequence[Batch], data_rank: int) -> None:
        """Implement `RepeatingEngine.repeat_gradients` with the weights of the wrapped engine,
        which implements it.
        """
        self._use_weights()
        cast(RepeatingEngine, self._engine).repeat_gradients(batches, data_rank)

    def compute_logits(self, batch: Batch) -> Tensor | None:
        """Implement `Engine.compute_logits` with the average."""
        self._use_average()
        return self._engine.compute_logits(batch)

    def get_state(self) -> EngineState:
        """Implement `Engine.get_state`. The average is `average/NAME`."""
        self._use_weights()
        state = self._engine.get_state()
        return EngineState(state.tensors | self._get_averages(state.tensors), state.steps)

    def load_state(self, state: EngineState) -> None:
        """Implement `Engine.load_state` without the average."""
        self._use_weights()
        rest = {
            name: tensor for name, tensor in state.tensors.items() if not name.startswith(AVERAGE)
        }
        self._engine.load_state(EngineState(rest, state.steps))

    @abstractmethod
    def _get_averages(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return `average/NAME` for every parameter. `tensors` is the state of the wrapped
        engine.
        """

    @abstractmethod
    def _use_average(self) -> None:
        """Put the average into the model, if it is not there."""

    @abstractmethod
    def _use_weights(self) -> None:
        """Put the trained weights into the model, if they are not there."""
