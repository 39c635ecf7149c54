"""The completion scripts hold every verb, option, config and key, and bash completes with its
script.
"""

import subprocess
from collections.abc import Callable

import pytest

from llmsys.config.loading.merge import read_overrides
from llmsys.config.run import RunConfig
from llmsys.config.section import find_default_kind
from llmsys.launch.commands.completion import collect_words, format_bash, format_fish, format_zsh
from llmsys.launch.commands.verbs import VERBS
from llmsys.launch.main import build_parser

WORDS = collect_words(build_parser)
COMPLETE = """
COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); compopt() { echo "nospace"; }
_llmsys; printf '%s\n' "${COMPREPLY[@]}"
"""


def complete(*words: str) -> list[str]:
    """The completions of the last word; bash splits `key=value` into three."""
    command = ["bash", "-c", f"{format_bash(WORDS)}\n{COMPLETE}", "bash", "llmsys", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_verbs_options_configs_keys_and_values() -> None:
    assert complete("tr") == ["train", "translate", "trace"]
    assert complete("train", "--pre") == ["--prepare"]
    assert complete("train", "train/dem") == ["train/demo"]
    assert complete("train", "train/demo", "optimizer.lear") == [
        "nospace",
        "optimizer.learning_rate=",
    ]
    assert complete("train", "train/demo", "schedule.kind", "=", "co") == ["constant", "cosine"]
    assert complete("doctor", "par") == ["parity"]
    assert complete("plan", "model/llama-7b", "gp") == ["nospace", "gpus="]


@pytest.mark.parametrize("script", [format_bash, format_zsh, format_fish])
def test_every_script_holds_every_word(script: Callable[..., str]) -> None:
    text = script(WORDS)
    for word in (
        *VERBS,
        *WORDS.configs,
        *WORDS.keys,
        *(choice for several in WORDS.choices.values() for choice in several),
    ):
        assert word in text


def test_every_key_is_a_key_of_a_config() -> None:
    assert len(WORDS.keys) > 500
    assert {"optimizer.learning_rate=", "engine.kind=deepspeed", "data.inputs="} <= set(WORDS.keys)
    for word in WORDS.keys:
        keys = tuple(word.partition("=")[0].split("."))
        assert keys[0] in RunConfig.model_fields
        assert read_overrides([word]).values
    assert find_default_kind(RunConfig, ("engine",)) == "torch"
