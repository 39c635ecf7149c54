"""The completion scripts hold every verb, option, config and key, and each shell completes with its
script.
"""

import contextlib
import os
import pty
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

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


COMPLETED = [
    ("doctor pari", "doctor parity"),
    ("train --pre", "train --prepare"),
    ("train train/dem", "train train/demo"),
    ("train train/demo optimizer.lear", "train train/demo optimizer.learning_rate="),
    ("plan model/llama-7b gp", "plan model/llama-7b gpus="),
]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "_llmsys").write_text(format_zsh(WORDS))
    lines = [
        "PS1= RPS1= PS2=; unsetopt zle_bracketed_paste 2>/dev/null",
        f"HISTFILE=; autoload -Uz compinit; compinit -u -D; source {tmp_path / '_llmsys'}",
        'llmsys() { print -r -- "GOT<$*>"; }',
        *(f"llmsys {typed}\t" for typed, _ in COMPLETED),
        "exit",
    ]
    said = type_into_terminal(["zsh", "-f", "-i"], lines, tmp_path)
    for _, completed in COMPLETED:
        assert f"GOT<{completed}>" in said, said


def type_into_terminal(command: list[str], lines: list[str], folder: Path) -> str:
    """What a program prints to a terminal into which the lines are typed, until it ends."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "HOME": str(folder), "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment,
        start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        os.write(ours, "".join(f"{line}\n" for line in lines).encode())
        found = b""
        # Linux ends a terminal without a reader at the other side with EIO
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                found += part
        process.wait()
    os.close(ours)
    return found.decode(errors="replace")


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes_what_is_typed(tmp_path: Path) -> None:
    (tmp_path / "llmsys.fish").write_text(format_fish(WORDS))
    for typed, completed in COMPLETED:
        program = f"source {tmp_path / 'llmsys.fish'}; complete -C 'llmsys {typed}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", program], capture_output=True, text=True, check=True,
            env=os.environ | {"HOME": str(tmp_path)},
        )  # fmt: skip
        words = [line.partition("\t")[0] for line in done.stdout.splitlines()]
        assert completed.rpartition(" ")[2] in words, (typed, words)
