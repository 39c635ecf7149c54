"""The smallest case that fails has the choices that make it fail, and no others."""

from collections.abc import Callable

import pytest

from llmsys.doctor.pairs.case_processes import CaseResult
from llmsys.doctor.pairs.cases import PairCase
from llmsys.doctor.pairs.factor import Factor, Value
from llmsys.doctor.pairs.shrink import find_smallest_case

FACTORS = tuple(Factor(name, (Value("no"), Value("yes"), Value("more"))) for name in "abcdefg")
ALL = PairCase(tuple((factor.name, "yes") for factor in FACTORS), seed=5)


def run_with(is_bad: Callable[[dict[str, str]], bool], refused: str = "") -> list[CaseResult]:
    """Return the smallest result of ALL, and every case that was run."""
    tried: list[CaseResult] = []

    def run_case(case: PairCase) -> CaseResult:
        labels = case.labels
        refusal = "refused" if refused and labels[refused] == "no" else ""
        result = CaseResult(
            case, failure="" if refusal or not is_bad(labels) else "bad", refusal=refusal
        )
        tried.append(result)
        return result

    return [find_smallest_case(CaseResult(ALL, failure="bad"), run_case, FACTORS), *tried]


@pytest.mark.parametrize("needed", ["", "a", "g", "bf", "ace", "abcdefg"])
def test_choices_that_do_not_matter_go_back_to_their_defaults(needed: str) -> None:
    smallest, *_ = run_with(lambda labels: all(labels[name] == "yes" for name in needed))
    assert not smallest.has_passed
    expected = {factor.name: "yes" if factor.name in needed else "no" for factor in FACTORS}
    assert smallest.case.labels == expected
    assert smallest.case.seed == 5


def test_a_refused_case_is_no_smaller_failure() -> None:
    smallest, *tried = run_with(lambda labels: labels["b"] == "yes", refused="e")
    assert {name for name, label in smallest.case.labels.items() if label == "yes"} == {"b", "e"}
    assert any(result.refusal for result in tried)


def test_each_trial_reports_the_smallest_case_so_far() -> None:
    sizes: list[int] = []

    def run_case(case: PairCase) -> CaseResult:
        return CaseResult(case, failure="bad" if case.labels["c"] == "yes" else "")

    smallest = find_smallest_case(
        CaseResult(ALL, failure="bad"),
        run_case,
        FACTORS,
        on_trial=lambda result: sizes.append(len(result.case.list_choices(FACTORS))),
    )
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(smallest.case.list_choices(FACTORS)) == 1
