"""Laws of tokenizer.json: the library's ids, no text becomes a control token, and something ends
every document.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.json_tokenizers import KINDS, LINES, LOSSLESS, write

TEXTS = [
    "the foxes",
    "",
    " two  spaces ",
    "line\nline\n\n\tend",
    "Straße 猫 🦊\0",
    "x      y",
    *LINES[:9],
]
END = "<|endoftext|>"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_ids_are_the_librarys_own_one_text_or_many(kind: str, tmp_path: Path) -> None:
    library, ours = write(kind, tmp_path), load_tokenizer(tmp_path)
    expected = [library.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert ours.encode_batch(TEXTS) == expected
    assert [ours.encode(text) for text in TEXTS] == expected
    assert ours.vocab_size == max(library.get_vocab().values()) + 1
    assert ours.find_piece_id("fox") == library.token_to_id("fox")
    assert ours.find_piece_id("no such piece") is None


@pytest.mark.parametrize("lossless", LOSSLESS)
def test_text_survives_and_end_ids_decode_to_nothing(lossless: str, tmp_path: Path) -> None:
    write(lossless, tmp_path)
    ours = load_tokenizer(tmp_path)
    for text in [
        *TEXTS,
        f"a{END}b",
        "a</s>b <s>c",
        "<|eot_id|>",
        "\udc80".encode("utf-8", "replace").decode(),
    ]:
        ids = ours.encode(text)
        begin = [ours.bos_id] if ours.bos_id >= 0 else []
        assert ours.decode([*begin, *ids, ours.eos_id]) == text


def test_no_text_becomes_a_control_token(kind: str, tmp_path: Path) -> None:
    library, ours = write(kind, tmp_path), load_tokenizer(tmp_path)
    added = library.get_added_tokens_decoder()
    controls = {
        number: token.content
        for number, token in added.items()
        if token.special and "unk" not in token.content
    }
    controls = {number: piece for number, piece in controls.items() if piece != "[UNK]"}
    for piece in controls.values():
        for text in (piece, f"a{piece}b", f"fox {piece} dog {piece}{piece}"):
            assert not controls.keys() & set(ours.encode(text)), text


def test_a_piece_that_ends_documents_is_no_text_even_if_the_file_says_so(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in values["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    ours = load_tokenizer(tmp_path)
    assert ours.eos_id not in ours.encode(f"a{END}b")
    assert ours.decode([*ours.encode("a fox"), ours.eos_id]) == "a fox"


@pytest.mark.parametrize(
    ("files", "end"),
    [
        (
            {
                "tokenizer_config.json": {"eos_token": "fox"},
                "special_tokens_map.json": {"eos_token": "dog"},
            },
            "fox",
        ),
        (
            {
                "tokenizer_config.json": {"eos_token": "none of these"},
                "config.json": {"eos_token_id": 0},
            },
            END,
        ),
        (
            {
                "special_tokens_map.json": {"eos_token": {"content": END}},
                "config.json": {"eos_token_id": 7},
            },
            END,
        ),
        (
            {
                "generation_config.json": {"eos_token_id": [0, 5]},
                "config.json": {"eos_token_id": 5},
            },
            END,
        ),
        (
            {
                "tokenizer_config.json": {},
                "config.json": {"eos_token_id": 0, "bos_token_id": 10_000},
            },
            END,
        ),
    ],
)
def test_the_end_is_what_the_files_beside_it_say(
    files: dict[str, Any], end: str, tmp_path: Path
) -> None:
    library = write("gpt2", tmp_path)
    library.add_tokens(["fox", "dog"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert (ours.eos_id, ours.bos_id) == (library.token_to_id(end), -1)
    assert load_tokenizer(tmp_path, "dog").eos_id == library.token_to_id("dog")


def test_what_stands_around_a_text_begins_and_ends_it_where_nothing_is_said(tmp_path: Path) -> None:
    write("bert", tmp_path)
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id) == (ours.find_piece_id("[CLS]"), ours.find_piece_id("[SEP]"))


def test_without_an_end_the_next_step_is_named(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(
        DataError,
        match=r"does not name an end-of-sequence token.*tokenizer\.eos_token.*: <\|endoftext\|>\.",
    ):
        load_tokenizer(tmp_path)
    assert load_tokenizer(tmp_path, END).eos_id == 0
    with pytest.raises(
        DataError, match=r"tokenizer\.eos_token=<end> is not a token of .*: <\|endoftext\|>\."
    ):
        load_tokenizer(tmp_path, "<end>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(
        DataError, match=r"tokenizer_config\.json is not JSON .* Download it again, or remove it\."
    ):
        load_tokenizer(tmp_path)


def test_padding_and_truncation_in_the_file_are_off(tmp_path: Path) -> None:
    library = write("bert", tmp_path)
    expected = library.encode("the lazy dog", add_special_tokens=False).ids
    library.enable_padding(length=20)
    library.enable_truncation(2)
    library.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode_batch(["the lazy dog", "fox"])[0] == expected


@pytest.mark.parametrize("lossless", LOSSLESS)
def test_bytes_of_an_incomplete_character_are_held_open(lossless: str, tmp_path: Path) -> None:
    write(lossless, tmp_path)
    ours = load_tokenizer(tmp_path)
    ids = ours.encode("猫")
    assert len(ids) >= 3
    assert ours.decode(ids[:-1]).endswith("�")


def test_the_fingerprint_is_of_the_bytes(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    file = tmp_path / "tokenizer.json"
    before = load_tokenizer(file).fingerprint
    (tmp_path / "special_tokens_map.json").write_text("{}")
    assert load_tokenizer(file).fingerprint == before
    file.write_bytes(file.read_bytes() + b"\n")
    assert load_tokenizer(file).fingerprint != before


def test_a_file_that_is_no_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(
        DataError,
        match=r"is not a tokenizer\.json of the library .* Download it again, or name another",
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match=r"x\.json cannot be read \(No such file"):
        load_tokenizer(tmp_path / "x.json")


def test_a_folder_with_both_is_the_tokenizer_json_unless_that_is_something_else(
    tmp_path: Path,
) -> None:
    write("gpt2", tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"SentencePiece's")
    assert load_tokenizer(tmp_path).find_piece_id(END) == 0
    (tmp_path / "tokenizer.json").write_text('{"fingerprint": "notes of another program"}')
    with pytest.raises(DataError, match=r"tokenizer\.model is not a SentencePiece model"):
        load_tokenizer(tmp_path)


def test_it_stays_on_the_calling_thread_and_is_imported_when_it_is_needed(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    script = f"""
import os, sys
import llmsys.data_pipeline.pipelines.prepare_dataset, llmsys.launch.main
import llmsys.vocabulary.tokenizer
assert "tokenizers" not in sys.modules
tokenizer = llmsys.vocabulary.tokenizer.load_tokenizer({str(tmp_path)!r})
before = len(os.listdir("/proc/self/task"))
assert tokenizer.encode_batch(["the lazy dog"] * 500)[0]
assert len(os.listdir("/proc/self/task")) == before
assert "torch" not in sys.modules
"""
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
