"""Judge a model on held-out bytes, and record CPU seconds, tokens and bits per byte of a training.

Reads the rows that `tools/bench/race/rows.py` writes. Nothing of the trainers is used: a model is a
function from ids to logits, and the cross entropy is torch's own, in float32.

Invariants:
- Every id of every held-out document is predicted once, its end included; bytes are those of its
  text.
- CPU seconds are those of the process from its start, imports included, of all its threads and
  finished children, without the judge's own.
"""

import json
import math
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

# B rows, T positions, V pieces
Logits = Callable[[Tensor], Tensor]

# A target that is no id: the rest of the last row of a document.
ABSENT = -1
# Rows of one forward pass.
ROWS = 4
# A quick look takes every so many-th row.
QUICK = 12
# A look at all rows follows where a quick look promises at most this much above the target: more
# before the first of them, which tells how much the quick rows differ from all.
FIRST_MARGIN, MARGIN = 0.06, 0.01


class Evaluation(NamedTuple):
    """One look at a model: tokens and CPU seconds of the training so far, bits per byte."""

    tokens: int
    cpu_seconds: float
    bits_per_byte: float
    is_whole: bool


def read_cpu_seconds() -> float:
    """Return the CPU seconds of this process since its start, of threads and ended children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


class Judge:
    """The held-out rows, and the evaluations of one training.

    Args:
        rows: file of `rows.py` with `heldout`, `heldout_targets` and `heldout_bytes`.
        target: bits per byte that end the training; 0: none do, and no look takes all rows.
    """

    def __init__(self, rows: Path, target: float) -> None:
        began = read_cpu_seconds()
        with np.load(rows) as file:
            self._inputs_BT = torch.from_numpy(file["heldout"].astype(np.int64))
            self._targets_BT = torch.from_numpy(file["heldout_targets"].astype(np.int64))
            self._bytes_B = torch.from_numpy(file["heldout_bytes"])
        self._target = target
        self._offset: float | None = None
        self.evaluations: list[Evaluation] = []
        self.own_seconds = read_cpu_seconds() - began

    def look(self, compute_logits: Logits, tokens: int, *, is_last: bool = False) -> bool:
        """Evaluate a model, on all rows where it may have reached the target.

        Args:
            compute_logits: ids (B, T) to logits (B, T, V), without dropout and gradients.
            tokens: tokens it was trained on.
            is_last: the training ends here.

        Returns:
            True where its bits per byte on all rows are at most the target: the training ends.
        """
        seconds = read_cpu_seconds() - self.own_seconds
        began = read_cpu_seconds()
        quick = self.measure_bits_per_byte(compute_logits, QUICK)
        expected = quick + (self._offset or 0.0)
        margin = FIRST_MARGIN if self._offset is None else MARGIN
        is_whole = self._target > 0 and (is_last or expected <= self._target + margin)
        found = expected
        if is_whole:
            found = self.measure_bits_per_byte(compute_logits, 1)
            self._offset = found - quick
        self.own_seconds += read_cpu_seconds() - began
        self.evaluations.append(Evaluation(tokens, seconds, found, is_whole))
        return is_whole and found <= self._target

    @torch.no_grad()
    def measure_bits_per_byte(self, compute_logits: Logits, step: int) -> float:
        """Return the bits per byte of every `step`-th held-out row."""
        nats = 0.0
        inputs_BT, targets_BT = self._inputs_BT[::step], self._targets_BT[::step]
        for first in range(0, len(inputs_BT), ROWS):
            targets_N = targets_BT[first : first + ROWS].flatten()
            logits_NV = compute_logits(inputs_BT[first : first + ROWS]).flatten(0, -2).float()
            nats += float(
                torch.nn.functional.cross_entropy(
                    logits_NV, targets_N, ignore_index=ABSENT, reduction="sum"
                )
            )
        return nats / math.log(2) / float(self._bytes_B[::step].sum())


class EvaluationSteps(NamedTuple):
    """The steps after which a training is looked at: the last, and those at even distances before.

    Attributes:
        steps: steps of the training.
        every: steps between looks.
        first: no look before this step.
    """

    steps: int
    every: int
    first: int

    def is_due(self, step: int) -> bool:
        """Return whether the model is looked at after a step, counted from 1."""
        left = self.steps - step
        return not left or (step >= self.first and left % self.every == 0)


def write_result(file: Path, spec: dict[str, Any], judge: Judge, parameters: int) -> None:
    """Write the result of a training by one rename, so that a file that exists is whole."""
    result = {
        "spec": spec,
        "parameters": parameters,
        "evaluations": [evaluation._asdict() for evaluation in judge.evaluations],
        "judge_cpu_seconds": judge.own_seconds,
    }
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)
