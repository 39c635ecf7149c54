"""Laws of the names that other trainers use: what a message suggests is a key of ours."""

import pytest

from llmsys.config.loading.common_names import (
    COMMON_KEYS,
    COMMON_SWITCHES,
    OTHER_UNITS,
    suggest_amount,
    suggest_override,
)
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


def test_a_switch_is_answered_with_keys_of_ours() -> None:
    keys = {word.partition("=")[0] for value in COMMON_SWITCHES.values() for word in value.split()
            if "=" in word}  # fmt: skip
    assert [key for key in keys if not has_key(key)] == []
    assert OTHER_UNITS.keys() <= COMMON_KEYS.keys()


@pytest.mark.parametrize(("name", "value", "answer"), [
    ("max_steps", "100", "Did you mean train.tokens=…? It counts tokens: steps times"),
    ("optim", "adamw_torch", "Did you mean optimizer.kind=adamw?"),
    ("bf16", None, "Did you mean train.precision=bf16?"),
    ("parallelism.tensor_parallel_degree", "2", "Did you mean layout.tensor=2?"),
    ("resume", None, "It is not needed: the same command continues"),
])  # fmt: skip
def test_a_name_of_another_trainer_is_answered(name: str, value: str | None, answer: str) -> None:
    assert str(suggest_override(name, value)).startswith(answer)


@pytest.mark.parametrize(("key", "value", "amount"), [
    ("hang_timeout_seconds", "5m", "300"), ("time_limit_minutes", "1:30", "90"),
    ("time_limit_minutes", "2h", "120"), ("sample_bytes", "10MB", "10_000_000"),
    ("tokens", "5m", "5_000_000"),
])  # fmt: skip
def test_a_unit_is_that_of_the_key(key: str, value: str, amount: str) -> None:
    assert suggest_amount(key, value) == amount
