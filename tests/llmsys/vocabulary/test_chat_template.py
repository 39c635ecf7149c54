"""Chats as transformers renders and encodes them, with the same tokens of the assistant."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmsys.convert.tokenizer_files import write_tokenizer
from llmsys.errors import DataError
from llmsys.vocabulary.chat_template import (
    ChatTemplate,
    EncodedChat,
    MessageError,
    encode_chat,
    load_chat_template,
)
from llmsys.vocabulary.chat_tokens import StoredChats, join_chat_tokens
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.chats import CHATML, GEMMA, LLAMA2, LLAMA3, MARKED_TEMPLATES, PLAIN_TEMPLATES
from tests.helpers.json_tokenizers import write
from tests.llmsys.convert.test_tokenizer_files import AS_IT_IS, trained

transformers = pytest.importorskip("transformers")

QUESTION = {"role": "user", "content": "What is\n\n2 + 2? 猫"}
ANSWER = {"role": "assistant", "content": "It is 4, the <b>fox</b> 🦊"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [QUESTION, ANSWER],
    "two": [
        QUESTION,
        ANSWER,
        {"role": "user", "content": " and 3? "},
        {"role": "assistant", "content": ""},
    ],
    "system": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER],
    "open": [QUESTION, ANSWER, QUESTION],
}
TOKENIZERS = {"chatml": "qwen2", "llama3": "llama3", "gemma": "gpt2", "llama2": "llama2"}


def write_template(kind: str, source: str, folder: Path) -> None:
    write(TOKENIZERS[kind], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))


def encode(folder: Path, chat: list[dict[str, Any]], tools: object = None) -> EncodedChat:
    tokenizer = load_tokenizer(folder)
    return encode_chat(tokenizer, load_chat_template(folder, tokenizer).render_chat(chat, tools))


@pytest.mark.parametrize("kind", MARKED_TEMPLATES)
def test_ids_and_answers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    write_template(kind, MARKED_TEMPLATES[kind], tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for name, chat in CHATS.items():
        tools = [{"type": "function", "function": {"name": "add"}}] if name == "two" else None
        found = encode(tmp_path, chat, tools)
        expected = theirs.apply_chat_template(
            chat, tools=tools, return_assistant_tokens_mask=True, return_dict=True
        )
        assert found.ids == expected["input_ids"], name
        assert [int(one) for one in found.is_answer] == expected["assistant_masks"], name
        assert any(found.is_answer)
        assert not all(found.is_answer)
        prompt = load_chat_template(tmp_path, load_tokenizer(tmp_path)).render_prompt(chat)
        assert prompt == theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )


@pytest.mark.parametrize("kind", PLAIN_TEMPLATES)
def test_prefixes_find_the_answers_that_marks_would(kind: str, tmp_path: Path) -> None:
    for name in ("marked", "plain"):
        (tmp_path / name).mkdir()
    write_template(kind, MARKED_TEMPLATES[kind], tmp_path / "marked")
    write_template(kind, PLAIN_TEMPLATES[kind], tmp_path / "plain")
    for name, chat in CHATS.items():
        assert encode(tmp_path / "plain", chat) == encode(tmp_path / "marked", chat), name


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_encodes_chats_as_its_exported_tokenizer(
    kind: str, tmp_path: Path
) -> None:
    options = AS_IT_IS | {
        "model_type": kind,
        "add_dummy_prefix": False,
        "control_symbols": ["<|im_start|>", "<|im_end|>"],
    }
    file = trained(tmp_path, **options)
    (tmp_path / "chat_template.jinja").write_text(MARKED_TEMPLATES["chatml"])
    (tmp_path / "hub").mkdir()
    write_tokenizer(tmp_path / "hub", file, 64, template=tmp_path / "chat_template.jinja")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    tokenizer = load_tokenizer(file)
    for name, chat in CHATS.items():
        found = encode_chat(tokenizer, load_chat_template(tmp_path, tokenizer).render_chat(chat))
        expected = theirs.apply_chat_template(
            chat, return_assistant_tokens_mask=True, return_dict=True
        )
        assert found.ids == expected["input_ids"], name
        # of unigram, `tokenizers` gives the bytes of neighbouring unknown characters the offsets of
        # all of them
        if kind == "bpe":
            assert [int(one) for one in found.is_answer] == expected["assistant_masks"], name


def test_stored_ids_say_what_has_a_loss_and_where_a_chat_ends() -> None:
    stored = join_chat_tokens([5, 6, 7, 8], [True, False, True, True], vocab_size=10)
    assert stored.tolist() == [15, 16, 7, 8, 20]  # nothing comes before the first
    found = StoredChats(10, eos_id=3).split(stored)
    assert found.ids.tolist() == [5, 6, 7, 8, 3]
    assert found.has_loss.tolist() == [False, False, True, True, False]
    assert found.is_border.tolist() == [False, False, False, False, True]


THINKING = CHATML.replace(
    "{{ m['content'] }}",
    "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}",
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "is no Jinja template: .*Correct it"),
        (THINKING,
            r"renders message 1 \(assistant\) differently when it is followed: the messages up to "
            r"it give"),
        ("{{ messages[0]['content'] }}{% for m in messages %}{{ m['role'] }}{% endfor %}X",
         r"renders message 1 \(assistant\) differently when it is followed: the messages before "
         r"it give"),
    ],
)  # fmt: skip
def test_a_template_whose_answers_cannot_be_found_is_named(source: str, message: str) -> None:
    template = ChatTemplate(source, location="chat.jinja")
    chat = [QUESTION, {"role": "assistant", "content": "so</think>it is"}] * 2
    with pytest.raises(DataError, match=f"chat.jinja {message}"):
        template.render_chat(chat)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ strftime_now('%Y') }}",
        "{% set n = namespace(a=1) %}{% set n.__init__ = 2 %}",
    ],
)
def test_a_template_runs_in_a_sandbox_without_a_clock(source: str) -> None:
    with pytest.raises(MessageError):
        ChatTemplate(source).render_chat(CHATS["one"])


def test_a_folder_without_a_template_is_named(tmp_path: Path) -> None:
    write("gpt2", tmp_path)
    with pytest.raises(
        DataError, match=r"has no chat template: neither chat_template\.jinja nor chat_template in"
    ):
        load_chat_template(tmp_path, load_tokenizer(tmp_path))
    with pytest.raises(DataError, match=r"nowhere\.jinja cannot be read as a chat template"):
        load_chat_template(tmp_path, load_tokenizer(tmp_path), tmp_path / "nowhere.jinja")
    assert GEMMA != LLAMA2 != LLAMA3
