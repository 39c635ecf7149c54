"""An engine whose optimizer trains between its average and its fast weights, and that evaluates
with the average.

The average is x = y - (1 - β) / β · (z - y), from the trained weights y and the optimizer's z - y
(Defazio 2024, arXiv:2405.15682, equation 5).

Invariants:
- The weights after an evaluation have the bits of before.
"""

import torch
from torch import Tensor

from llmsys.engine.averaging_engine import AVERAGE, PARAMETER, AveragingEngine
from llmsys.engine.engine import Engine
from llmsys.model.local_tensor import get_local_tensor

LOOKAHEAD = "lookahead_moment/"


class ScheduleFreeEngine(AveragingEngine):
    """An engine with a schedule-free optimizer. `beta` is the average's share in the trained
    weights.
    """

    def __init__(self, engine: Engine, beta: float) -> None:
        """Wrap an engine whose optimizer is schedule-free.

        Args:
            engine: Trains the weights y at which gradients are taken. Its `get_state` must return
                the tensors themselves.
            beta: Share of the average in these weights, the first of `optimizer.betas`; above 0.
        """
        super().__init__(engine)
        self._factor = (1 - beta) / beta
        self._saved: dict[str, Tensor] = {}

    @torch.no_grad()
    def _get_averages(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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
        for name, mean in self._get_averages(tensors).items():
            weights = get_local_tensor(tensors[name.replace(AVERAGE, PARAMETER, 1)])
            self._saved[name.replace(AVERAGE, PARAMETER, 1)] = weights.clone()
            weights.copy_(get_local_tensor(mean))

    @torch.no_grad()
    def _use_weights(self) -> None:
        if not self._saved:
            return
        tensors = self._engine.get_state().tensors
        for name, saved in self._saved.items():
            get_local_tensor(tensors[name]).copy_(saved)
        self._saved = {}
