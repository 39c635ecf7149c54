"""A tokenizer of the user's own code: a dataset and a model of it, what its source decides, and
the refusals.
"""

from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.config.tokenizer import PythonTokenizerConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.errors import ConfigError, DataError
from llmsys.launch.commands.templates.tokenizer import Bytes
from llmsys.train.run_data import load_run_tokenizer, open_first_source
from llmsys.vocabulary.python_tokenizer import (
    LoadedPythonTokenizer,
    check_python_tokenizer,
    load_python_tokenizer,
)
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import make_crawl

TEMPLATE = (ROOT / "launch/commands/templates/tokenizer.py").read_text()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(TEMPLATE)
    return tmp_path


def build_config() -> RunConfig:
    data = {"kind": "crawl", "folder": "made", "inputs": ["crawl/*.warc.gz"],
        "executor": {"kind": "inline"},
            "split": {"heldout_fraction": 0.3}}  # fmt: skip
    return RunConfig.model_validate(
        {"data": data, "tokenizer": {"kind": "python", "path": "own.py:Bytes"}}
    )


def test_a_dataset_has_its_ids_and_an_edit_is_noticed() -> None:
    make_crawl(Path("crawl"), files=1, pages=8)
    config = build_config()
    manifest = prepare_dataset(config)
    assert manifest.vocab_size == 257
    shards, tokenizer = open_first_source(config, "train")
    ids = shards.get_tokens(0).tolist()
    assert ids[-1] == 256
    assert "river" in bytes(ids[:-1]).decode() + tokenizer.decode(shards.get_tokens(1).tolist())
    stored = load_dataset_tokenizer(Path("made/tokenizer")).fingerprint
    assert stored == tokenizer.fingerprint == manifest.tokenizer_fingerprint
    other = config.tokenizer.model_copy(update={"options": {"lowercase": True}})
    with pytest.raises(DataError, match=r"the options of own.py:Bytes did not prepare made"):
        load_run_tokenizer(config.model_copy(update={"tokenizer": other}))
    Path("own.py").write_text(
        TEMPLATE.replace("return list(", "return list(reversed(list(").replace(
            ".encode())", ".encode())))"
        )
    )
    with pytest.raises(
        DataError,
        match=r"own.py:Bytes is not the code that prepared made .*prepare the dataset again",
    ):
        load_dataset_tokenizer(Path("made/tokenizer"))
    with pytest.raises(DataError, match=r"is not the code that prepared made"):
        load_run_tokenizer(config)
    with pytest.raises(DataError, match="names a tokenizer of your own code"):
        load_tokenizer(Path("made/tokenizer"))
    with pytest.raises(DataError, match=r"is not the code that prepared made"):
        open_first_source(config, "train")
    again = prepare_dataset(config)
    assert again.fingerprint != manifest.fingerprint


def test_options_decide_the_fingerprint() -> None:
    plain, lower = (
        LoadedPythonTokenizer(
            PythonTokenizerConfig(path="own.py:Bytes", options={"lowercase": one})
        )
        for one in (False, True)
    )
    assert plain.fingerprint != lower.fingerprint
    assert lower.encode("Aé") == list("aé".encode())
    assert lower.decode([*"aé".encode(), 256]) == "aé"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return 257", "return 100", "eos_id=256, but eos_id is an id from 0 to vocab_size - 1"),
        (
            "return list(",
            "return [257] + list(",
            "gave the id 257 for the text 'A probe.*integers from 0 to 256",
        ),
        (
            "return list(",
            "return [256] + list(",
            "gave eos_id=256 for the text .*Use a separate id",
        ),
        ("return list(", "1 / 0; return list(", "ZeroDivisionError: division by zero, line"),
        ('.decode("utf-8", "replace")', "", "decode returned bytes. Return the text"),
        ("def encode", "def encode_", "own.py:Bytes has no encode. Write def encode"),
    ],
)
def test_a_class_that_cannot_be_used_is_named(old: str, new: str, message: str) -> None:
    Path("own.py").write_text(TEMPLATE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        load_python_tokenizer(PythonTokenizerConfig(path="own.py:Bytes"))


def test_ids_of_another_program_need_its_own_tokenizer() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.kind: python .*data.kind=tokens"):
        load_run_config(
            "train/demo", ["data={kind: tokens}", "tokenizer={kind: python, path: own.py:Bytes}"]
        )


def test_the_kit_tests_every_text() -> None:
    with pytest.raises(ConfigError, match=r"returns 'one' for the ids of 'One'\. Correct decode"):
        check_python_tokenizer(Bytes(lowercase=True), ["one", "One"])
    check_python_tokenizer(Bytes(lowercase=True), ["One"], lossless=False)
