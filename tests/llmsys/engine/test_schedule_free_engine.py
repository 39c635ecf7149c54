"""A schedule-free run evaluates and stores its average, and trains on as if it had not."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from llmsys.engine.engine import EngineState, StepResult
from llmsys.engine.schedule_free_engine import ScheduleFreeEngine

BETA = 0.8


class OneWeight:
    """An engine of one weight; its logits are the weight, and a step adds 1 to it and to z - y."""

    device, module = torch.device("cpu"), None

    def __init__(self) -> None:
        self.tensors = {
            "parameter/w": torch.tensor([0.3]),
            "lookahead_moment/w": torch.tensor([0.1]),
        }

    def train_step(self, batches: Sequence[Any], *rest: Any) -> StepResult:
        for tensor in self.tensors.values():
            tensor += 1
        return StepResult(0.0, 0.0, 1)

    def compute_logits(self, batch: Any) -> Tensor:
        return self.tensors["parameter/w"].clone()

    def get_state(self) -> EngineState:
        return EngineState(dict(self.tensors), 1)

    def load_state(self, state: EngineState) -> None:
        assert state.tensors.keys() == self.tensors.keys()


def test_the_average_is_evaluated_and_the_weights_come_back_with_their_bits() -> None:
    inner, undisturbed = OneWeight(), OneWeight()
    engine: Any = ScheduleFreeEngine(inner, BETA)  # type: ignore[arg-type]
    for _ in range(3):
        engine.train_step([], 0.1)
        undisturbed.train_step([])
        weight, lookahead = undisturbed.tensors.values()
        # x is where y = (1 - β) z + β x.
        average = (weight - (1 - BETA) * (weight + lookahead)) / BETA
        torch.testing.assert_close(engine.compute_logits(None), average)
        torch.testing.assert_close(engine.compute_logits(None), average)
        state = engine.get_state()
        torch.testing.assert_close(state.tensors["average/w"], average)
        assert torch.equal(state.tensors["parameter/w"], weight)
        engine.load_state(state)
