"""The table of sources in configs/model/README.md: every named system has a config, its true
count, and a training.
"""

import re
from collections.abc import Iterator

import pytest

from llmsys.config.loading.load import load_model_config, load_run_config
from llmsys.estimate.model_tensors import count_parameters
from tests.helpers.paths import CONFIGS, ROOT

README = (CONFIGS / "model" / "README.md").read_text()
# Named in the lecture notes and design documents that the project implements.
SYSTEMS = (
    "RNN", "LSTM", "GRU", "Transformer base", "big", "Universal Transformer", "BERT base", "large",
    "RoBERTa large",
    "XLNet large", "Transformer-XL", "T5", "Longformer", "Linformer", "Reformer", "ViT", "GPT-1",
    "GPT-2",
    "Megatron-LM", "Turing-NLG", "GPT-3", "LLaMA-3.1", "DeepSeek 67B", "DeepSeek-V2", "DeepSeek-V3",
    "PaLM",
    "GLM-130B", "Gopher", "Chinchilla",
)  # fmt: skip
UNITS = {"M": 10**6, "B": 10**9}


def iter_rows() -> Iterator[list[str]]:
    """Yield the cells of the table of systems."""
    table = README.split("| system | config |")[1].split("\n\n")[0].splitlines()[2:]
    for line in table:
        yield [cell.strip() for cell in line.strip("|").split("|")]


ROWS = list(iter_rows())


def list_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_system_of_the_sources_has_a_row() -> None:
    named = ", ".join(row[0] for row in ROWS)
    assert [system for system in SYSTEMS if system not in named] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_has_a_config_its_count_and_a_training(row: list[str]) -> None:
    _, configs, counts, printed, trainings = row
    names, numbers = list_names(configs), counts.split(", ")
    assert len(names) == len(numbers) > 0
    for name, number in zip(names, numbers, strict=True):
        total = count_parameters(load_model_config(f"model/{name}")).total
        assert f"{total / UNITS[number[-1]]:.3g}".ljust(len(number) - 1, "0") == number[:-1], name
    assert printed == "not printed" or len(printed.split(", ")) == len(names)
    assert list_names(trainings)
    for training in list_names(trainings):
        assert load_run_config(training).train.tokens > 0
        # The result of the training is in a table below, or in the text.
        assert README.count(f"`{training}`") > 1, f"{training} has no result"


def test_commands_in_files_of_tiny_runs_name_the_file() -> None:
    for path in sorted((CONFIGS / "train").glob("*-tiny.yaml")):
        words = path.read_text()
        assert f"llmsys train train/{path.stem}" in words or path.stem == "named-tiny", (
            path.relative_to(ROOT)
        )
