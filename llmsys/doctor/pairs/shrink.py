"""Shrink a case that fails: choices go back to their defaults, many at once and then one by one.

Invariants:
- The smallest case fails, and none of its choices can be left out.
"""

from collections.abc import Callable, Sequence

from llmsys.doctor.pairs.case_processes import CaseResult
from llmsys.doctor.pairs.cases import PairCase
from llmsys.doctor.pairs.factor import Factor
from llmsys.doctor.pairs.factors import FACTORS


def find_smallest_case(
    failed: CaseResult,
    run_case: Callable[[PairCase], CaseResult],
    factors: Sequence[Factor] = FACTORS,
    on_trial: Callable[[CaseResult], None] = lambda smallest: None,
) -> CaseResult:
    """Return the result of the smallest case that still fails.

    Args:
        failed: a case that failed.
        run_case: runs a case; one that is refused does not count as failed.
        factors: the factors.
        on_trial: called after each case that was run, with the smallest that failed so far.

    Returns:
        A failed result; `failed` itself where nothing can be left out.
    """
    defaults = {factor.name: factor.default for factor in factors}
    smallest = failed
    size = max(1, len(smallest.case.list_choices(factors)) // 2)
    while True:
        # Factors that do not act are reset with those that make them act.
        names = [name for name, label in smallest.case.assignment if label != defaults[name]]
        parts = [names[start : start + size] for start in range(0, len(names), size)]
        found = False
        for part in parts:
            case = smallest.case
            for name in part:
                case = case.replace_label(name, defaults[name])
            result = run_case(case)
            if not result.has_passed and not result.refusal:
                smallest = result
                found = True
            on_trial(smallest)
        if size == 1 and not found:
            return smallest
        if not found:
            size = max(1, size // 2)
