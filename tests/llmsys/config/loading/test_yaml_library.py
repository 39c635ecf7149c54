"""libyaml gives the values, lines and errors of the parser in Python."""

import random
from pathlib import Path

import pytest

from llmsys.config.loading import yaml_files
from llmsys.config.loading.yaml_files import parse_yaml
from llmsys.errors import ConfigError
from tests.helpers.stage_digest import ROOT

TEXTS = [path.read_text() for path in sorted((ROOT / "configs").rglob("*.yaml"))]
PIECES = [
    "[", "]", "{", "}", ": ", ":", "- ", "? ", "\n", "  ", "\t", "#", " #", "'", '"', "|", ">", 
    "&a ", "*a", "!x ", "@", "`", "%", "---\n", "...\n",
    ",", "\x85", "\u2028", "é", "\x07", "\ufeff", "<<: *a\n",
    "null", "1_000", "3e-4", ".inf", "no", "a:b", "\\x41", "\\",
]  # fmt: skip


def parse(text: str) -> object:
    try:
        return parse_yaml(text, "my.yaml")
    except ConfigError as error:
        return str(error)


def change_text(source: random.Random, text: str) -> str:
    start = source.randrange(max(1, len(text) - 400))
    text = text[start : start + 400]
    for _ in range(source.choice((1, 1, 2, 4))):
        place = source.randrange(len(text) + 1)
        length = source.choice((0, 0, 1, 5))
        text = text[:place] + source.choice(PIECES) + text[place + length :]
    return text


def test_shipped_configs_and_changed_ones_are_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    texts = TEXTS + [change_text(source, source.choice(TEXTS)) for _ in range(3_000)]
    found = [parse(text) for text in texts]
    assert any(isinstance(each, str) for each in found)
    monkeypatch.setattr(yaml_files, "_LibraryLoader", yaml_files._YamlLoader)
    for text, each in zip(texts, found, strict=True):
        assert parse(text) == each, text


def test_a_deep_document_is_an_error(tmp_path: Path) -> None:
    assert "the limit is 64 levels of nesting" in str(parse("[" * 100_000))
    assert "the limit is 64 levels of nesting" in str(parse("- " * 1_000))
