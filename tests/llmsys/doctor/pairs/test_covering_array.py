"""Every pair of values is in a case, or is refused with its message."""

from itertools import combinations

from llmsys.doctor.pairs.covering_array import build_covering_array
from llmsys.doctor.pairs.factor import Assignment, Factor, Value


def build_factor(name: str, *labels: str, **options: object) -> Factor:
    return Factor(name, tuple(Value(label) for label in labels), **options)  # type: ignore[arg-type]


FACTORS = (
    build_factor("engine", "fsdp", "ddp", "zero"),
    build_factor("axis", "one", "two"),
    build_factor("schedule", "1f1b", "gpipe", acts_with={"axis": frozenset({"two"})}),
    build_factor("model", "dense", "experts", "image", "text"),
)


def refuse_axes_of_zero(case: Assignment) -> str | None:
    if case["engine"] == "zero" and case["axis"] == "two":
        return "axis: zero runs no stages"
    return (
        "engine: no images under ddp"
        if (case["engine"], case["model"]) == ("ddp", "image")
        else None
    )


def list_pairs(case: Assignment) -> set[tuple[tuple[str, str], ...]]:
    active = [(factor.name, case[factor.name]) for factor in FACTORS if factor.is_active(case)]
    return set(combinations(active, 2))


def test_every_pair_of_values_is_in_a_case_or_refused() -> None:
    array = build_covering_array(FACTORS, refuse_axes_of_zero, seed=3)
    covered = set().union(*(list_pairs(case) for case in array.cases))
    wanted = {
        ((first.name, one.label), (second.name, other.label))
        for first, second in combinations(FACTORS, 2)
        for one in first.values
        for other in second.values
    }
    void = {(("axis", "one"), ("schedule", "1f1b")), (("axis", "one"), ("schedule", "gpipe"))}
    assert covered | set(array.refused) | set(array.untold) | void == wanted
    assert not covered & set(array.refused)
    assert array.num_pairs == len(covered)


def test_a_refused_pair_has_its_message() -> None:
    refused = build_covering_array(FACTORS, refuse_axes_of_zero, seed=3).refused
    assert refused[("engine", "zero"), ("axis", "two")] == "axis: zero runs no stages"
    assert refused[("engine", "ddp"), ("model", "image")] == "engine: no images under ddp"


def test_no_case_is_refused() -> None:
    cases = build_covering_array(FACTORS, refuse_axes_of_zero, seed=3).cases
    assert [refuse_axes_of_zero(case) for case in cases] == [None] * len(cases)


def test_equal_seeds_give_equal_cases_and_others_do_not() -> None:
    def list_cases(seed: int) -> list[dict[str, str]]:
        return build_covering_array(FACTORS, refuse_axes_of_zero, seed).cases

    assert list_cases(5) == list_cases(5)
    assert any(list_cases(5) != list_cases(seed) for seed in range(6, 10))


def test_a_value_that_is_refused_with_its_needs_is_named_once() -> None:
    def refuse_text(case: Assignment) -> str | None:
        return "model: this machine reads no text" if case["model"] == "text" else None

    array = build_covering_array(FACTORS, refuse_text, seed=1)
    assert array.refused_values == {("model", "text"): "model: this machine reads no text"}
    assert not array.refused


def test_a_factor_that_never_acts_is_named_and_in_no_pair() -> None:
    def refuse(case: Assignment) -> str | None:
        return "axis: no stages" if case["axis"] == "two" else None

    array = build_covering_array(FACTORS, refuse, seed=3)
    idle = {("schedule", "1f1b"), ("schedule", "gpipe")}
    assert set(array.refused_values) == {("axis", "two"), *idle}
    assert array.refused_values["schedule", "gpipe"] == (
        "acts beside axis=two only, which no case has"
    )
    covered = set().union(*(list_pairs(case) for case in array.cases))
    assert not any(value in idle for pair in covered for value in pair)
    assert array.num_pairs == len(covered)


def test_the_cases_are_fewer_than_the_pairs() -> None:
    array = build_covering_array(FACTORS, lambda case: None, seed=1)
    # 3 engines with 4 models need 12 cases at least.
    assert 12 <= len(array.cases) <= 15
    assert array.num_pairs == 6 + 6 + 12 + 2 + 8 + 8


def test_a_slow_value_is_in_fewer_cases() -> None:
    others = tuple(build_factor(f"choice {number}", *"abcd") for number in range(12))

    def count_cases(*, is_slow: bool) -> int:
        slow = Factor("compile", (Value("none"), Value("block", is_slow=is_slow)))
        cases = build_covering_array((slow, *others), lambda case: None, seed=1).cases
        return sum(case["compile"] == "block" for case in cases)

    assert 4 <= count_cases(is_slow=True) < 0.8 * count_cases(is_slow=False)
