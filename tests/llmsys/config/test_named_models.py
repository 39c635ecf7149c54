"""Every named model is the architecture of its source: the same as Hugging Face's class with the
published sizes.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from llmsys.config.loading.load import build_model_config, load_model_config
from tests.helpers.paths import CONFIGS, TEST_DATA

FOLDER = CONFIGS / "model"
# The sizes that the papers' tables print, in the words of a config.json.
SIZES = {
    one.pop("id"): one
    for one in json.loads((TEST_DATA / "config" / "named_sizes.json").read_text())
}
# What those tables leave out, and the releases say: context, rotation and eps.
OF_THE_RELEASE = ("max_position_embeddings", "position.theta", "position.scaling.", "norm.eps")
RELEASED = {
    # its sizes stand in GLM's class, which scores otherwise
    "deepseek-moe-16b": ("moe.", "position.fraction"),
    "deepseek-v2": ("attention.scale", "moe.routed_scaling_factor", "moe.groups."),
    "deepseek-v2-lite": ("attention.scale",),
    "deepseek-v3": ("attention.scale", "moe.balance.sequence_weight"),
    "gemma2-27b": ("attention.scale",),
    "gpt-neox-20b": ("feed_forward.kind",),  # the tanh form
    "mixtral-8x7b": ("moe.balance.weight",),
    # The paper's network where Marian's differs: no bias on the logits, sinusoids in turn, dropout,
    # starting weights.
    "transformer-base": ("head.bias", "position.arrangement", "initializer", "feed_forward.kind",
        "embedding.scale"),
    "transformer-big": (
        "head.bias", "position.arrangement", "initializer", "feed_forward.kind", "embedding.scale",
        "dropout.",
    ),
}  # fmt: skip
NAMED_IN_THE_LITERATURE = [
    "transformer-base", "transformer-big", "bert-base", "bert-large", "roberta-large",
    "xlnet-large", "gpt2-xl",
    "megatron-8.3b", "turing-nlg-17b", "gpt3-175b", "llama3.1-405b", "deepseek-67b", "deepseek-v2",
    "deepseek-v3",
    "palm-540b", "glm-130b", "gopher-280b", "chinchilla-70b",
]  # fmt: skip


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize("name", SIZES)
def test_a_named_model_is_the_published_class_with_the_published_sizes(name: str) -> None:
    ours = dict(leaves(load_model_config(f"model/{name}").model_dump(exclude={"encoder"})))
    theirs = dict(leaves(build_model_config(SIZES[name], name).model_dump(exclude={"encoder"})))
    different = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
    assert [
        key for key in different if not key.startswith(OF_THE_RELEASE + RELEASED.get(name, ()))
    ] == []


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "mistral-7b", "mixtral-8x7b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b",
        "gemma2-2b", "gemma2-27b",
     "deepseek-v2", "deepseek-v3", "pythia-70m", "gpt-neox-20b", "olmo2-7b", "olmoe-1b-7b",
     "roberta-large"],
)  # fmt: skip
def test_a_named_model_is_its_published_file(name: str) -> None:
    published = json.loads((TEST_DATA / "config" / "published_configs.json").read_text())
    values = next(one for one in published if one["id"] == name)
    model = build_model_config({key: value for key, value in values.items() if key != "id"})
    assert load_model_config(f"model/{name.replace('llama-3.1', 'llama3.1')}") == model


def test_every_row_of_the_tables_has_a_file() -> None:
    files = {path.stem for path in FOLDER.glob("*.yaml")}
    assert [name for name in NAMED_IN_THE_LITERATURE if name not in files] == []


def test_a_file_begins_with_its_source_and_is_listed() -> None:
    words = (FOLDER.parent / "README.md").read_text()
    paths = sorted(FOLDER.glob("*.yaml"))
    assert len(paths) > len(SIZES)
    assert [path.stem for path in paths if not path.read_text().startswith("# ")] == []
    assert [path.stem for path in paths if not is_listed(path.stem, words)] == []


def is_listed(name: str, words: str) -> bool:
    """Whether a text has a name, or `family-` + … `size`: sizes may have a hyphen, `30b-a3b`."""
    cuts = (name.rpartition("-"), name.partition("-"))
    return f"`{name}`" in words or any(
        f"`{family}-` + " in words and f"`{size}`" in words for family, _, size in cuts
    )
