"""Laws of the names that other trainers use: what a message suggests is a key of ours."""

import pytest

from llmsys.config.loading.common_names import COMMON_KEYS
from llmsys.config.loading.validation_errors import find_config_key
from llmsys.config.run import RunConfig
from llmsys.config.section import list_fields, list_section_types


@pytest.mark.parametrize("key", sorted(set(COMMON_KEYS.values())))
def test_a_suggested_key_is_one_of_ours(key: str) -> None:
    sections = [RunConfig]
    for name in key.split("."):
        fields = [field for section in sections for field in list_fields([section], name)]
        assert fields or (name == "kind" and len(sections) > 1), f"{key}: no section has {name}"
        sections = [one for field in fields for one in list_section_types(field.annotation)]


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
