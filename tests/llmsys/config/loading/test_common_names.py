"""Laws of the names that other trainers use: what a message suggests is a key of ours."""

import pytest

from llmsys.config.loading.common_names import COMMON_KEYS
from llmsys.config.loading.validation_errors import find_config_key
from llmsys.config.run import RunConfig
from llmsys.config.section import list_fields, list_section_types


def test_a_suggested_key_is_one_of_ours() -> None:
    assert len(COMMON_KEYS) > 20
    assert [key for key in set(COMMON_KEYS.values()) if not has_key(key)] == []


def has_key(key: str) -> bool:
    sections = [RunConfig]
    for name in key.split("."):
        fields = [field for section in sections for field in list_fields([section], name)]
        if not fields and not (name == "kind" and len(sections) > 1):
            return False
        sections = [one for field in fields for one in list_section_types(field.annotation)]
    return True


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("batch.sequences", "batch.sequences"),
        ("temperature", "generation.temperature"),
        ("seed", "run.seed"),
        ("lr", "optimizer.learning_rate"),
        ("nothing_like_it", None),
    ],
)
def test_an_option_is_answered_with_the_key_of_its_name(option: str, key: str | None) -> None:
    assert find_config_key(option, RunConfig) == key
