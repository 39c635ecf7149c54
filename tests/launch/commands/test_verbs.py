"""What the parsers of verbs say to the words of other programs."""

import pytest

from llmsys.errors import ConfigError
from llmsys.launch.commands.verbs import suggest_verb
from llmsys.launch.main import build_parser


@pytest.mark.parametrize(("verb", "override", "meant"), [
    ("estimate", "device=h100-sxm", "--device h100-sxm"),
    ("train", "prepare=true", "--prepare?"),
    ("plan", "gpu=8", "gpus=8"),
    ("launch", "hosts=a:1", "nodes=a:1"),
])  # fmt: skip
def test_an_option_without_dashes_and_a_misspelled_word_are_named(
    verb: str, override: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"is no key of the config. Did you mean {meant}"):
        build_parser(verb).check_overrides([override])


def test_keys_and_sections_are_no_words_of_a_verb() -> None:
    build_parser("plan").check_overrides(["gpus=8", "batch.sequences=8", "base=train/demo"])


@pytest.mark.parametrize(("word", "verb"), [
    ("export", "convert"), ("Fit", "train"), ("trian", "train"), ("zzz", None),
])  # fmt: skip
def test_a_verb_of_another_program_is_ours(word: str, verb: str | None) -> None:
    assert suggest_verb(word) == verb
