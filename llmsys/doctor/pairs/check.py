"""`llmsys doctor pairs`: build the array, run its cases, shrink those that fail, and report.

Writes datasets and runs into a temporary folder, and nothing else.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmsys.doctor.pairs.case_processes import CaseResult, CaseRunner
from llmsys.doctor.pairs.cases import (
    Limits,
    PairCase,
    RefusedError,
    build_default_assignment,
    build_parts,
)
from llmsys.doctor.pairs.covering_array import CoveringArray, Pair, build_covering_array
from llmsys.doctor.pairs.factor import Assignment, Factor
from llmsys.doctor.pairs.factors import FACTORS, IMAGE_SIZE
from llmsys.doctor.pairs.shrink import find_smallest_case
from llmsys.doctor.toy_dataset import (
    write_toy_chats,
    write_toy_dataset,
    write_toy_images,
    write_toy_pairs,
)
from llmsys.errors import ConfigError

# Tokens that objectives and fill-in-the-middle ask the tokenizer for.
SYMBOLS = (
    "<mask>",
    "<cls>",
    "<sep>",
    "<fim_prefix>",
    "<fim_middle>",
    "<fim_suffix>",
    *(f"<extra_id_{number}>" for number in range(4)),
)
LABELS = ("first", "second", "third")

# Factors whose pairs with every other one are in the sample, besides the
# events.
SAMPLED = ("schedule of stages",)
# Values of the sample of factors that have many: each of them with every other value would double
# the cases. The others are in the whole array.
SAMPLED_VALUES = {
    "kill": ("no", "2 ddp"),
    "schedule of stages": ("1f1b", "interleaved"),
    "sources": ("one", "mixture"),
}
# Events whose pairs with every value are in the whole array alone: when a checkpoint by minutes is
# due, it is saved as one by steps is.
RARE_EVENTS = (("save", "by minutes"),)
# Further values that the sample leaves out.
UNSAMPLED = (("attention", "python"), ("feed-forward", "python"))

# Failed cases that are shrunk; the others are listed as they are.
MAX_SHRUNK = 5


@dataclass(frozen=True)
class PairsReport:
    """The result of a run of the array.

    Attributes:
        array: cases, covered and refused pairs.
        results: one for each case that was run.
        shrunk: the smallest failing case of failed ones.
        seed: seed of the array, and of its first case.
        seconds: time of all cases.
    """

    array: CoveringArray
    results: list[CaseResult]
    shrunk: list[CaseResult]
    seed: int
    seconds: float

    @property
    def failures(self) -> list[CaseResult]:
        """Cases that did not pass."""
        return [result for result in self.results if not result.has_passed]

    @property
    def has_passed(self) -> bool:
        """True if every case was run and is within its bands."""
        return not self.failures and len(self.results) == len(self.array.cases)

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "passed": self.has_passed,
            "seed": self.seed,
            "pairs": self.array.num_pairs,
            "cases": len(self.array.cases),
            "cases_run": len(self.results),
            "seconds": round(self.seconds, 1),
            "failures": [result.to_dict() for result in self.failures],
            "smallest": [result.to_dict() for result in self.shrunk],
            "refused_values": [
                {"factor": name, "value": label, "message": message}
                for (name, label), message in self.array.refused_values.items()
            ],
            "refused": _list_refusals(self.array.refused),
            "untold": _list_refusals(self.array.untold),
        }


def _list_refusals(refused: dict[Pair, str]) -> list[dict[str, Any]]:
    return [
        {"pair": [list(one) for one in pair], "message": message}
        for pair, message in refused.items()
    ]


def build_array(
    seed: int,
    limits: Limits,
    *,
    is_sample: bool = False,
    factors: tuple[Factor, ...] = FACTORS,
    on_case: Callable[[int, int], None] = lambda cases, left: None,
) -> CoveringArray:
    """Build the covering array that the config accepts.

    Args:
        seed: seed of choices between equal ones.
        limits: what the machine has.
        is_sample: cover the pairs of every value with each event that happens and with each
            schedule of stages only.
        factors: the factors.
        on_case: called with the cases so far and the pairs that are left.

    Returns:
        The array.
    """
    folder = Path(tempfile.gettempdir()) / "pairs" / "case"

    def check(assignment: Assignment) -> str | None:
        try:
            build_parts(assignment, seed, folder, limits, factors)
        except RefusedError as refused:
            return str(refused)
        return None

    sampled = {
        (factor.name, value.label)
        for factor in factors
        if factor.is_event or factor.name in SAMPLED
        # What does not happen beside a value is all that its other tests have.
        for value in (factor.values[1:] if factor.is_event else factor.values)
    } - {*RARE_EVENTS}

    def is_wanted(pair: Pair) -> bool:
        return not sampled.isdisjoint(pair)

    if (problem := check(build_default_assignment(factors))) is not None:
        raise ConfigError(f"the case with every default is refused: {problem}")
    if not is_sample:
        return build_covering_array(factors, check, seed, on_case=on_case)
    avoided = {
        (factor.name, value.label)
        for factor in factors
        for value in factor.values
        if value.is_slow
        or value.label not in SAMPLED_VALUES.get(factor.name, (value.label,))
        or (factor.name, value.label) in UNSAMPLED
    }
    return build_covering_array(factors, check, seed, is_wanted, avoided, on_case)


def write_datasets(root: Path) -> None:
    """Write the datasets of all cases: documents twice, chats, pairs of texts, labelled texts,
    and images.
    """
    write_toy_dataset(root / "crawl", symbols=SYMBOLS)
    write_toy_dataset(root / "other crawl", symbols=SYMBOLS, seed=6)
    write_toy_chats(root / "chat")
    write_toy_pairs(root / "pairs")
    write_toy_pairs(root / "labelled", labels=LABELS)
    write_toy_images(root / "images", IMAGE_SIZE, labels=LABELS)


@dataclass
class PairsCheck:
    """Runs cases of an array.

    Attributes:
        limits: what the machine has.
        factors: the factors.
        minutes: time after which no case is begun; 0: no limit.
        on_result: called with each result.
        on_trial: called while a failed case is shrunk, after each case that was run, with the
            smallest that failed so far.
    """

    limits: Limits = field(default_factory=Limits)
    factors: tuple[Factor, ...] = FACTORS
    minutes: float = 0.0
    on_result: Callable[[CaseResult], None] = lambda result: None
    on_trial: Callable[[CaseResult], None] = lambda smallest: None

    def run_array(self, array: CoveringArray, seed: int) -> PairsReport:
        """Run the cases of an array, each with its own seed, and shrink the failed ones.

        Args:
            array: The cases.
            seed: Seed of the first case; case n has `seed` + n.

        Returns:
            The results, and the smallest failing cases.
        """
        cases = [
            PairCase(tuple(case.items()), seed + number) for number, case in enumerate(array.cases)
        ]
        return self.run_cases(cases, array, seed)

    def run_cases(self, cases: list[PairCase], array: CoveringArray, seed: int) -> PairsReport:
        """Run cases in a temporary folder, and shrink the failed ones.

        Args:
            cases: Cases with their seeds.
            array: The array they come from, for the report.
            seed: Seed of the array, for the report.

        Returns:
            The results of the cases that were begun, and the smallest cases of the first
            `MAX_SHRUNK` failures.
        """
        began = time.monotonic()
        deadline = began + 60 * self.minutes if self.minutes else float("inf")
        with tempfile.TemporaryDirectory(
            prefix="llmsys-pairs-", ignore_cleanup_errors=True
        ) as scratch:
            root = Path(scratch)
            write_datasets(root)
            runner = CaseRunner(root, self.limits, factors=self.factors)
            results = runner.run_cases(cases, self.on_result, deadline)
            seconds = time.monotonic() - began
            failed = [result for result in results if not result.has_passed and not result.refusal]
            shrunk = [
                find_smallest_case(result, runner.run_case, self.factors, self.on_trial)
                for result in failed[:MAX_SHRUNK]
            ]
        return PairsReport(array, results, shrunk, seed, seconds)
