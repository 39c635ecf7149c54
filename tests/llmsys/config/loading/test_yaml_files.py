"""YAML as people write it: numbers are numbers, words are words, and a slip names its line."""

import time

import pytest

from llmsys.config.loading.merge import read_overrides
from llmsys.config.loading.yaml_files import dump_yaml, format_inline, parse_yaml
from llmsys.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e9", 1e9),
        ("-2.5E+3", -2500.0),
        ("1_000_000", 1_000_000),
        ("10_000.5", 10000.5),
        (".5", 0.5),
        ("0", 0),
        ("-7", -7),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", float("inf")),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: object) -> None:
    parsed, _ = parse_yaml(f"key: {text}", "x")
    assert parsed == {"key": value}
    assert type(parsed["key"]) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "off",
        "2026-01-31",
        "12:30:00",
        "1.2.3",
        "0x1f",
        "010",
        "e5",
        "_1",
        "1e",
        "a_b",
    ],
)
def test_words_stay_words(text: str) -> None:
    assert parse_yaml(f"key: {text}", "x")[0] == {"key": text}


@pytest.mark.parametrize(
    "word", ["3e-4", "1_000", "null", "true", "no", "", "12", "a: b", "- c", "# d", "2026-01-01"]
)
def test_dumped_text_reads_back_as_text(word: str) -> None:
    assert parse_yaml(dump_yaml({"key": word, "list": [word]}), "x")[0] == {
        "key": word,
        "list": [word],
    }
    assert parse_yaml(f"key: {format_inline(word)}", "x")[0] == {"key": word}


@pytest.mark.parametrize("number", [3e-4, 1e-8, 1e22, 0.1, 5, 10**12, -1.5])
def test_dumped_numbers_read_back_to_the_last_bit(number: float) -> None:
    assert parse_yaml(dump_yaml({"key": number}), "x")[0] == {"key": number}


def test_every_key_knows_its_line() -> None:
    _, lines = parse_yaml("a:\n  b: 1\n  c:\n    - d: 2\n    - e\n", "x")
    assert lines[("a",)] == 1
    assert lines[("a", "b")] == 2
    assert lines[("a", "c", "0", "d")] == 4
    assert lines[("a", "c", "1")] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: a is given twice (first on line 1). Keep one of them."),
        (
            "a:\n  b: 1\n  b: 2\n",
            "f.yaml:3: a.b is given twice (first on line 2). Keep one of them.",
        ),
        (
            "a:\n\tb: 1\n",
            "f.yaml:2: this line is indented with a tab, but YAML allows only spaces. Use two "
            "spaces per level.",
        ),
        ("a: [1, 2\nb: 3\n", "f.yaml:2: not YAML:"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: not YAML: but found another document."),
        (
            "a: !!python/object:os.system x\n",
            "f.yaml:1: not YAML: could not determine a constructor",
        ),
        ("x: &x {a: 1}\ny: {<<: *x}\n", "f.yaml:2: '<<' is not a name. Inherit with `base:`."),
        ("a: &a [*a]\n", "f.yaml:1: this alias contains itself. Write it out."),
        ("? [a, b]\n: 1\n", "f.yaml:1: 'this key' is not a name."),
    ],
)
def test_a_slip_names_file_line_and_way_out(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert message in str(caught.value)


HOSTILE = {
    "aliases of aliases": (
        "a0: &a0 [x, x]\n"
        + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
        r"x:1: aliases repeat more than 1,000 values. Write them out, or inherit a file with "
        r"`base:`",
    ),
    "one alias too often": (
        f"a: &a y\nb: [{', '.join(['*a'] * 5_000)}]",
        "x:1: aliases repeat more than 1,000",
    ),
    "lists in lists": (
        "run: " + "[" * 50_000,
        "x:1: the limit is 64 levels of nesting, more than any section has. Write",
    ),
    "mappings in mappings": (
        "\n".join(" " * i + "a:" for i in range(2_000)),
        "x:64: the limit is 64 levels of nesting",
    ),
    "a number without end": (
        "a: " + "9" * 10_000,
        r"x: a number has more digits than the limit \(4,300\). Write",
    ),
    "an alias of itself": ("a: &a [*a]", "x:1: this alias contains itself. Write it out."),
}


@pytest.mark.parametrize("title", HOSTILE)
def test_hostile_documents_end_with_a_message_and_soon(title: str) -> None:
    text, message = HOSTILE[title]
    began = time.process_time()
    with pytest.raises(ConfigError, match=message):
        parse_yaml(text, "x")
    assert time.process_time() - began < 5


def test_aliases_that_a_person_writes_are_values() -> None:
    text = "a: &a {b: 1, c: [2]}\nd: [*a, *a]\ne: *a\n"
    one = {"b": 1, "c": [2]}
    assert parse_yaml(text, "x")[0] == {"a": one, "d": [one, one], "e": one}


def test_overrides_are_no_deeper_than_files() -> None:
    for override in (".".join(["a"] * 5_000) + "=1", "run.name=" + "[" * 50_000):
        with pytest.raises(ConfigError, match=r"the limit is 64"):
            read_overrides([override])
