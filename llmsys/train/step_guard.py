"""Skip bad steps: those whose loss or gradient norm is not finite, or a spike by
`train.spike_detection`.

Also lists the sequences and documents of a step, for the record of a skipped one.

Invariants:
- A step is rejected before the optimizer changes anything, on all ranks alike: all decide by the
  same numbers.
- Steps are counted from 1, as in the log.
- The decisions are part of the checkpoint, so a resumed run decides the same.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from llmsys.config.train import TrainConfig
from llmsys.data.step_batches import BucketedStepBatches, StepBatches, WindowStepBatches
from llmsys.dataset.token_shards import TokenShards
from llmsys.engine.engine import StepResult
from llmsys.errors import LlmsysError


class StepGuard:
    """Decides between backward pass and optimizer step whether a step is applied."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._accepted: deque[tuple[float, float]] = deque(
            maxlen=config.spike_detection.window_steps
        )
        self._consecutive_skips = 0
        self._last_skipped = 0
        self.skipped_steps: set[int] = set()
        """Skipped steps: they changed no weight and are not repeated after a rewind."""
        self.problem = ""
        """Problem of the last checked step; empty if it is good."""

    def accept_step(self, loss: float, gradient_norm: float) -> bool:
        """Return whether the step may be applied; see `Accept` in engine.py."""
        self.problem = self._describe_problem(loss, gradient_norm)
        return not self.problem

    def record_accepted(self, step: int, result: StepResult) -> None:
        """Add an applied step to the medians."""
        self._accepted.append((result.loss, result.gradient_norm))
        # Steps that a rewind repeats do not count as an end of the bad ones.
        if step > self._last_skipped:
            self._consecutive_skips = 0

    def record_skipped(self, step: int) -> None:
        """Record a step that was not applied.

        Raises:
            LlmsysError: the policy is to stop, or too many steps in a row were bad.
        """
        if self.problem:
            self._consecutive_skips += 1
            self._last_skipped = max(step, self._last_skipped)
            self.skipped_steps.add(step)
            self._check_bad_step_policy(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; JSON reproduces the numbers exactly."""
        return {
            "skipped_steps": sorted(self.skipped_steps),
            "accepted": list(self._accepted),
            "consecutive_skips": self._consecutive_skips,
            "last_skipped": self._last_skipped,
        }

    def load_state_dict(self, state: dict[str, Any], known: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Load the state of a checkpoint; `known` are bad steps found since it was saved."""
        self.skipped_steps = {*state.get("skipped_steps", ()), *known}
        self._accepted.clear()
        self._accepted.extend((loss, norm) for loss, norm in state.get("accepted", ()))
        if not known:  # a rewind keeps the count, or a run could rewind for ever
            self._consecutive_skips, self._last_skipped = (
                state.get("consecutive_skips", 0),
                state.get("last_skipped", 0),
            )

    def _describe_problem(self, loss: float, gradient_norm: float) -> str:
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            return f"loss {loss:.4g}, gradient norm {gradient_norm:.4g}. Both must be finite"
        spike = self._config.spike_detection
        # With a shorter history the median is too noisy for a limit.
        if len(self._accepted) == spike.window_steps:
            losses, norms = zip(*self._accepted, strict=True)
            for name, value, past, key, factor in (
                (
                    "gradient norm",
                    gradient_norm,
                    norms,
                    "max_grad_norm_ratio",
                    spike.max_grad_norm_ratio,
                ),
                ("loss", loss, losses, "max_loss_ratio", spike.max_loss_ratio),
            ):
                if factor and value > factor * (middle := median(past)):
                    return (
                        f"{name} {value:.4g}, and the median of the last {spike.window_steps} "
                        f"steps is {middle:.4g}. train.spike_detection.{key} allows {factor:g} "
                        "times that"
                    )
        return ""

    def _check_bad_step_policy(self, step: int) -> None:
        config = self._config
        if config.on_bad_step == "stop":
            raise LlmsysError(
                f"step {step}: {self.problem}. Lower optimizer.learning_rate, train in fp32, or "
                "skip such steps with train.on_bad_step=skip; the same command continues from "
                "the last checkpoint."
            )
        if self._consecutive_skips > config.max_consecutive_bad_steps:
            raise LlmsysError(
                f"step {step}: {self.problem}. It is consecutive bad step "
                f"{self._consecutive_skips}; "
                f"train.max_consecutive_bad_steps={config.max_consecutive_bad_steps} are allowed. "
                "Lower optimizer.learning_rate or train in fp32; the same command continues from "
                "the last checkpoint."
            )


# Documents that one record lists. `num_documents` has the count of a step with more.
MAX_LISTED = 200


def describe_step_contents(
    steps: StepBatches, sources: Sequence[TokenShards], step: int
) -> dict[str, Any]:
    """Return sequence numbers (first and last) and document ids of a step over all ranks.

    Args:
        steps: batches of the run, of any rank.
        sources: token shards by source.
        step: index of the step, counted from 0.
    """
    if isinstance(steps, WindowStepBatches):
        numbers = np.unique(steps.get_assignment(step)).tolist()
        places = [place for number in numbers for place in steps.windows.list_documents(number)]
        return {"sequences": [numbers[0], numbers[-1]], **_describe_documents(places, sources)}
    if isinstance(steps, BucketedStepBatches):
        rows = sorted(
            {int(row) for group in steps.grouping.get_step_buckets(step) for row in group}
        )
        return _describe_documents([(0, row) for row in rows], [steps.pairs.targets])
    return {}


def _describe_documents(
    places: list[tuple[int, int]], sources: Sequence[TokenShards]
) -> dict[str, Any]:
    distinct = list(dict.fromkeys(places))
    ids = [
        str(sources[source].get_lineage(document)["id"])
        for source, document in distinct[:MAX_LISTED]
    ]
    return {"documents": ids, "num_documents": len(distinct)}
