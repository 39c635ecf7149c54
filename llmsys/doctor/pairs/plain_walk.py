"""The plain process on its way through what a run did, and how far rounding moves its numbers.

Invariants:
- Errors are planted in the forward and backward passes, and in moments that a run stores in fewer
  bits: data, sums over rows, optimizers and schedules are exact.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import assert_never

import torch

from llmsys.config.optimizer import OptimizerConfig
from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.comparison import (
    DOCUMENTS,
    LEAST,
    LOSS,
    NORM,
    Rounding,
    decode_moments,
    has_choices,
    list_nats,
)
from llmsys.doctor.pairs.events import Entry
from llmsys.doctor.pairs.factors import STEP_TOKENS
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.plain_step import Errors, PlainProcess, PlainState, no_errors
from llmsys.doctor.rounding import SAMPLES, RoundingErrors
from llmsys.train.precision import DTYPES

# The run rounds, and so does the plain process.
COMPUTATIONS = 2

# Samples are drawn one by one, until they explain a number. A tensor that is zero but for rounding,
# as the gradient of a bias that a softmax does not see, is beyond three of them by chance in one of
# some hundred runs.
MOST_SAMPLES = 16
# Where rounding decides between two things, as between two nearly equal experts, few samples hold
# the same decisions as the run: of a single step more are drawn than of all that is before it, too.
MOST_CHOICE_SAMPLES = 64


class PlainWalk:
    """A plain process that takes the actions of a run, one after another.

    Args:
        phases: the phases of the run.
        is_corrected: it takes over the state of the run after each step. Without, the moments
            before a step are not those of the run, and do not tell which gradient its moments
            contain: a small one would be the rounding of a large square.
    """

    def __init__(self, phases: Sequence[Phase], *, is_corrected: bool = True) -> None:
        self.config: RunConfig = phases[0].config
        self.is_corrected = is_corrected
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
                is_known = self.is_corrected and entry.tensors is not None
                found = decode_moments(entry.tensors or {}) if is_known else None
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
    is_single = walk.config.train.resolved_precision == "fp32"
    is_smooth = is_single and not has_choices(walk.config.model)
    for errors in _iter_errors(walk.config, MOST_SAMPLES if is_smooth else MOST_CHOICE_SAMPLES):
        walk.plain.load_state(before)
        _add_changes(allowed, exact, _take_numbers(walk, entry, errors))
        walk.plain.load_state(after)
        yield allowed


def iter_walk_rounding(
    phases: Sequence[Phase], entries: Sequence[Entry]
) -> Iterator[list[Rounding]]:
    """Yield how far rounding moves the numbers of each action of a run, with all before it, by
    three samples and by each further one.

    Args:
        phases: the phases of the run.
        entries: its actions.
    """
    unseen = [Entry(entry.action, entry.loss, entry.norm) for entry in entries]
    walk = PlainWalk(phases)
    exact = [_take_numbers(walk, entry, no_errors) for entry in unseen]
    allowed: list[dict[str, float]] = [{} for _ in entries]
    for sample, errors in enumerate(_iter_errors(walk.config, MOST_SAMPLES)):
        walk = PlainWalk(phases)
        generator = torch.Generator().manual_seed(sample)
        for place, entry in enumerate(unseen):
            _add_changes(allowed[place], exact[place], _take_numbers(walk, entry, errors))
            if entry.action.kind == "train" and entry.action.is_applied:
                round_moments(walk.plain.state.tensors, walk.config.optimizer, generator)
        if sample + 1 < SAMPLES:
            continue
        # A single number, as a loss, may hardly move by chance: rounding explains no less than
        # before.
        for before, now in pairwise(allowed):
            for name, value in before.items():
                now[name] = max(now.get(name, 0.0), value)
        yield [*allowed]


class WalkRounding:
    """Measure how far rounding moves the numbers of a run, once a number is beyond its band.

    Args:
        phases: the phases of the run.
        entries: its actions.
    """

    def __init__(self, phases: Sequence[Phase], entries: Sequence[Entry]) -> None:
        self._samples = iter_walk_rounding(phases, entries)
        self._drawn: list[Rounding] | None = None

    def iter_rounding(self, place: int) -> Iterator[Rounding]:
        """Yield how far rounding moves the numbers of one action, by the samples so far and more.

        Args:
            place: index among the actions.
        """
        if self._drawn is not None:
            yield self._drawn[place]
        for drawn in self._samples:
            self._drawn = drawn
            yield drawn[place]


def round_moments(
    tensors: dict[str, torch.Tensor], config: OptimizerConfig, generator: torch.Generator
) -> None:
    """Change moments by what their stored form may be off by, at random; float32 by nothing.

    Args:
        tensors: the state of a plain process; changed.
        config: the `optimizer:` section of the run.
        generator: source of the errors.
    """
    match getattr(config, "moments", "fp32"):
        case "fp32":
            return
        case "bf16":
            measure_spacing = measure_bfloat16_spacing
        case "int8":
            measure_spacing = measure_int8_spacing
        case unknown:
            raise ValueError(f"moments of {unknown} have no stated spacing")
    for name, moment in tensors.items():
        kind = name.partition("/")[0]
        if kind not in ("first_moment", "second_moment"):
            continue
        share = torch.rand(moment.shape, generator=generator, dtype=moment.dtype) * 2 - 1
        changed = moment + share * measure_spacing(kind, moment)
        tensors[name] = changed.clamp(min=0) if kind == "second_moment" else changed


def measure_bfloat16_spacing(kind: str, moment: torch.Tensor) -> torch.Tensor:
    """Return at least the distance of neighbours: 8 bits, of which the first is always 1."""
    return moment.abs() * 2**-7


def measure_int8_spacing(kind: str, moment: torch.Tensor) -> torch.Tensor:
    """Return the distance of neighbouring codes, (c / 127)² or (c / 255)⁴ of the largest.

    Args:
        kind: name of the moment.
        moment: its numbers. The largest is that of a row, and a block is no longer than a row.
    """
    largest = moment.abs().amax(-1, keepdim=True)
    share = moment.abs() / largest.clamp(min=LEAST)
    if kind == "first_moment":
        return largest * ((share.sqrt() + 1 / 127) ** 2 - share)
    return largest * ((share ** (1 / 4) + 1 / 255) ** 4 - share)


Numbers = dict[str, torch.Tensor]


def _take_numbers(walk: PlainWalk, entry: Entry, errors: Errors) -> Numbers:
    loss, norm = walk.take_action(entry, errors)
    numbers = {LOSS: torch.tensor(loss), NORM: torch.tensor(norm)}
    numbers[DOCUMENTS] = list_nats(walk.plain.documents)
    return numbers | {name: value.clone() for name, value in walk.plain.state.tensors.items()}


def _iter_errors(config: RunConfig, samples: int) -> Iterator[Errors]:
    dtype = DTYPES[config.train.resolved_precision]
    for sample in range(samples):
        # The gradient of a weight sums all tokens of a step, and that of a bias of keys is zero but
        # for the rounding of this sum.
        yield _wrap_errors(RoundingErrors(dtype, sample, terms=STEP_TOKENS))


def _wrap_errors(errors: RoundingErrors) -> Errors:
    # One context, so that every pass has other errors.
    return lambda: errors


def _add_changes(allowed: dict[str, float], exact: Numbers, changed: Numbers) -> None:
    for name, value in changed.items():
        apart = (value.double() - exact[name].double()).norm()
        assert not apart.isnan(), f"errors of rounding make {name} NaN"
        # Buffers are compared by their largest element, which is no longer than their length.
        allowed[name] = max(allowed.get(name, 0.0), COMPUTATIONS * float(apart))
