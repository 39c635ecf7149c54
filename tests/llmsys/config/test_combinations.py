"""The table of what cannot be combined: its keys and values are those of a config, and its messages
are complete.
"""

from collections.abc import Iterator
from string import Formatter
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import pytest

from llmsys.config.combinations import (
    Condition,
    Feature,
    RefusedChoice,
    find_refused_combinations,
    load_combinations,
)
from llmsys.config.run import RunConfig
from llmsys.config.section import SectionType, list_section_types

# What a message may name besides keys of a run.
GIVEN = {"value", "name", "count", "feature", "choice", "otherwise"}
ROWS = [(feature, choice) for feature in load_combinations() for choice in feature.refuses]


def name_row(part: object) -> str:
    return " and ".join(map(str, part.conditions)) if hasattr(part, "conditions") else str(part)


def list_owners(key: str) -> list[SectionType]:
    """Return the section classes that have the last word of a dotted key."""
    members: list[SectionType] = [RunConfig]
    *parents, last = key.split(".")
    for name in parents:
        members = [
            child
            for one in members
            if name in one.model_fields
            for child in list_section_types(one.model_fields[name].annotation)
        ]
    return [one for one in members if last in one.model_fields or hasattr(one, last)]


def iter_conditions() -> Iterator[Condition]:
    for feature, choice in ROWS:
        yield from (*feature.conditions, *choice.conditions)


def list_literals(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return {str(value) for value in get_args(annotation)}
    return {value for one in get_args(annotation) for value in list_literals(one)}


@pytest.mark.parametrize("key", sorted({one.key for one in iter_conditions()}))
def test_every_key_of_the_table_is_one_of_a_run(key: str) -> None:
    assert list_owners(key)


@pytest.mark.parametrize(
    "condition", sorted({one for one in iter_conditions() if one.values}, key=str), ids=str
)
def test_every_value_of_the_table_is_one_that_its_key_can_have(condition: Condition) -> None:
    last = condition.key.rpartition(".")[2]
    owners = list_owners(condition.key)
    legal = {
        value
        for owner in owners
        if last in owner.model_fields
        for value in list_literals(owner.model_fields[last].annotation)
    }
    # Numbers, and what a class computes, have no list of values.
    if last == "kind" or legal - {"auto"}:
        assert set(condition.values) <= legal | {"null", "[]"}


@pytest.mark.parametrize(("feature", "choice"), ROWS, ids=name_row)
def test_every_message_is_one_sentence_and_a_remedy_over_values_that_exist(
    feature: Feature, choice: RefusedChoice
) -> None:
    fields = [field for _, field, _, _ in Formatter().parse(choice.message) if field is not None]
    assert all(field in GIVEN or list_owners(field) for field in fields)
    assert list_owners(choice.key)
    assert list_owners(choice.shown)
    assert ("otherwise" in fields) <= bool(feature.otherwise)
    assert choice.message.endswith(".")
    assert "  " not in choice.message


def test_a_choice_of_a_section_that_is_not_there_is_not_made() -> None:
    torch = SimpleNamespace(kind="torch")
    run = SimpleNamespace(engine=torch, layout=SimpleNamespace(tensor=2))
    assert Condition("engine.kind", "=", ("torch",)).is_met_by(run)
    assert Condition("layout.tensor", ">", ("1",)).is_met_by(run)
    for operator in ("", "=", "!="):
        assert not Condition("engine.zero_stage", operator, ("3",)).is_met_by(run)
        assert not Condition("model.rnn", operator, ("null",)).is_met_by(run)


def test_rows_about_a_key_are_those_that_name_it() -> None:
    run = SimpleNamespace(
        train=SimpleNamespace(reproducibility="bitwise", precision="fp16"),
        engine=SimpleNamespace(kind="accelerate"),
    )
    assert [one.key for one in find_refused_combinations(run)] == ["engine.kind", "train.precision"]
    assert [one.key for one in find_refused_combinations(run, about="train.precision")] == [
        "train.precision"
    ]
