"""The table of model types names fields, conversions and specials that exist, and nothing twice."""

import inspect

import pytest

from llmsys.config.model import ModelConfig
from llmsys.config.section import SectionType, list_section_types
from llmsys.hugging_face import families
from llmsys.hugging_face.families import CONVERSIONS, FAMILIES, SPECIALS


def has_field(path: str) -> bool:
    """Return whether some kind of a model's sections has a field."""
    members: list[SectionType] = [ModelConfig]
    *parents, last = path.split(".")
    for name in parents:
        members = [
            child
            for one in members
            if name in one.model_fields
            for child in list_section_types(one.model_fields[name].annotation)
        ]
    return any(last in one.model_fields for one in members)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_a_family_is_one_of_a_model(name: str) -> None:
    table = FAMILIES[name].table
    paths = [path for row in table["keys"].values() for path in row[0].split()]
    assert [path for path in (*paths, *table["values"]) if not has_field(path)] == []
    spellings = [key for keys in table["keys"] for key in keys.split()]
    assert len(spellings) == len(set(spellings))


def test_every_conversion_and_every_special_is_used() -> None:
    rows = [row for family in FAMILIES.values() for row in family.table["keys"].values()]
    assert {row[1] for row in rows if isinstance(row[1], str)} == CONVERSIONS.keys()
    used = {name for family in FAMILIES.values() for name in family.table["special"]}
    assert used == SPECIALS.keys()


def test_the_options_of_a_special_are_those_of_both_its_functions() -> None:
    for family in FAMILIES.values():
        for name, options in family.table["special"].items():
            for function in filter(None, SPECIALS[name]):
                inspect.signature(function).bind({}, {}, **options)


def test_an_entry_whose_part_is_misspelt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"families\.yaml: llama: 'onyl' is unknown\. Known: "):
        families._merge_entry({"llama": {"onyl": {}}}, "llama")
