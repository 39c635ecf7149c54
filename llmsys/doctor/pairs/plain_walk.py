"""The plain process on its way through what a run did, and how far rounding moves its numbers.

Invariants:
- Errors are planted in the forward and backward passes alone: data, sums over rows, optimizers and
  schedules are exact.
"""

from collections.abc import Iterator, Sequence
from typing import assert_never

import torch

from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.comparison import LOSS, NORM, Rounding, decode_moments
from llmsys.doctor.pairs.events import Entry
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.plain_step import Errors, PlainProcess, PlainState, no_errors
from llmsys.doctor.rounding import SAMPLES, RoundingErrors
from llmsys.train.precision import DTYPES

# The run rounds, and so does the plain process.
COMPUTATIONS = 2


class PlainWalk:
    """A plain process that takes the actions of a run, one after another.

    Args:
        phases: the phases of the run.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.config: RunConfig = phases[0].config
        self.plain = PlainProcess(self.config)
        self._branch_config = phases[-1].config
        # The first phase begins with the initial weights.
        self._saved: dict[int, PlainState] = {0: self.plain.copy_state()}

    @property
    def sign_rate(self) -> float:
        """Largest rate of an optimizer whose update is a sign; 0 for others."""
        optimizer = self.config.optimizer
        if optimizer.kind != "lion":
            return 0.0
        return optimizer.learning_rate * optimizer.embedding_lr_multiplier

    def take_action(self, entry: Entry, errors: Errors = no_errors) -> tuple[float, float]:
        """Take the action of an entry, and return its loss and gradient norm, 0 where it has none.

        Args:
            entry: what the run did.
            errors: returns the context of forward and backward passes.
        """
        action, plain = entry.action, self.plain
        if action.run and action.kind == "load":
            plain.branch(self._branch_config)
        match action.kind:
            case "train":
                found = None if entry.tensors is None else decode_moments(entry.tensors)
                return plain.train(
                    action.step, is_applied=action.is_applied, found=found, errors=errors
                )
            case "evaluate":
                return plain.evaluate(errors), 0.0
            case "save":
                self._saved[action.step] = plain.copy_state()
            case "load":
                plain.load_state(self._saved[action.step])
            case unreachable:
                assert_never(unreachable)
        return 0.0, 0.0

    def correct_state(self, entry: Entry) -> None:
        """Take over the state of a run after an action, where it was looked at."""
        if entry.tensors is not None:
            self.plain.correct_state(decode_moments(entry.tensors))


def iter_step_rounding(walk: PlainWalk, entry: Entry, before: PlainState) -> Iterator[Rounding]:
    """Yield how far rounding moves the numbers of one step or evaluation, by one sample and more.

    Args:
        walk: a plain process that has taken the action; it is left as it is.
        entry: the action.
        before: the state before it.
    """
    after = walk.plain.copy_state()
    walk.plain.load_state(before)
    exact = _take_numbers(walk, entry, no_errors)
    allowed: dict[str, float] = {}
    for errors in _iter_errors(walk.config):
        walk.plain.load_state(before)
        _add_changes(allowed, exact, _take_numbers(walk, entry, errors))
        walk.plain.load_state(after)
        yield allowed


def measure_walk_rounding(phases: Sequence[Phase], entries: Sequence[Entry]) -> list[Rounding]:
    """Return how far rounding moves the numbers of each action of a run, with all before it.

    Args:
        phases: the phases of the run.
        entries: its actions.
    """
    unseen = [Entry(entry.action, entry.loss, entry.norm) for entry in entries]
    walk = PlainWalk(phases)
    exact = [_take_numbers(walk, entry, no_errors) for entry in unseen]
    allowed: list[dict[str, float]] = [{} for _ in entries]
    for errors in _iter_errors(walk.config):
        walk = PlainWalk(phases)
        for place, entry in enumerate(unseen):
            _add_changes(allowed[place], exact[place], _take_numbers(walk, entry, errors))
    return [*allowed]


Numbers = dict[str, torch.Tensor]


def _take_numbers(walk: PlainWalk, entry: Entry, errors: Errors) -> Numbers:
    loss, norm = walk.take_action(entry, errors)
    numbers = {LOSS: torch.tensor(loss), NORM: torch.tensor(norm)}
    return numbers | {name: value.clone() for name, value in walk.plain.state.tensors.items()}


def _iter_errors(config: RunConfig) -> Iterator[Errors]:
    dtype = DTYPES[config.train.resolved_precision]
    for sample in range(SAMPLES):
        yield _wrap_errors(RoundingErrors(dtype, sample))


def _wrap_errors(errors: RoundingErrors) -> Errors:
    # One context, so that every pass has other errors.
    return lambda: errors


def _add_changes(allowed: dict[str, float], exact: Numbers, changed: Numbers) -> None:
    for name, value in changed.items():
        apart = (value.double() - exact[name].double()).norm()
        assert not apart.isnan(), f"errors of rounding make {name} NaN"
        # Buffers are compared by their largest element, which is no longer than their length.
        allowed[name] = max(allowed.get(name, 0.0), COMPUTATIONS * float(apart))
