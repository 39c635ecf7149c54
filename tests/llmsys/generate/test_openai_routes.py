"""The routes of OpenAI's API give the texts of `generate`, whole and in pieces, and name what they
do not do.
"""

import http.client
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from llmsys.generate.chat_model import ChatModel
from llmsys.generate.chat_server import ChatServer
from llmsys.generate.openai_routes import StopFoundError, StopWatch
from llmsys.generate.prompt_completion import build_decoding_params
from llmsys.generate.text_generation import generate_texts
from tests.helpers.chat_servers import LETTERS, FewLetters, build_chat_model, serve


class Format:
    """A chat template: `role: content`, a line for each message, then the answer."""

    stop_ids = (LETTERS.index("\n"),)

    def encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text = "".join(f"{one['role']}: {one['content']}\n" for one in messages)
        return FewLetters().encode(f"{text}assistant: ")


@pytest.fixture
def chat() -> ChatModel:
    return build_chat_model("tiny", max_position_embeddings=64)


@pytest.fixture
def server(chat: ChatModel) -> Iterator[ChatServer]:
    with serve(chat) as made:
        yield made


def post(server: ChatServer, route: str, body: Mapping[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content


def read_events(content: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def generate(chat: ChatModel, prompt: str, **changes: Any) -> str:
    settings = chat.config.generation.model_copy(update=changes)
    (text,) = generate_texts(
        chat.model,
        chat.tokenizer,
        [prompt],
        max_new_tokens=settings.max_new_tokens,
        decoding=build_decoding_params(settings),
        seed=settings.seed,
    )
    return text


def test_a_completion_is_the_text_of_generate(server: ChatServer, chat: ChatModel) -> None:
    asked = {"prompt": "the river", "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": 3}
    expected = generate(chat, "the river", max_new_tokens=9, temperature=0.7, top_p=0.9, seed=3)
    status, content = post(server, "/v1/completions", asked)
    found = json.loads(content)
    assert (status, found["object"], found["model"]) == (200, "text_completion", "tiny")
    [choice] = found["choices"]
    assert choice["text"] == expected
    ended = len(expected) < 9
    assert choice["finish_reason"] == ("stop" if ended else "length")
    # The id that ends documents comes before a prompt.
    assert found["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": len(expected),
        "total_tokens": 10 + len(expected),
    }


def test_the_newer_of_two_limits_counts(server: ChatServer, chat: ChatModel) -> None:
    assert len(generate(chat, "the river", max_new_tokens=9, seed=5)) > 3
    asked = {"prompt": "the river", "max_completion_tokens": 9, "max_tokens": 3, "seed": 5}
    found = json.loads(post(server, "/v1/completions", asked)[1])
    assert found["usage"]["completion_tokens"] > 3


def test_pieces_join_to_the_whole_text(server: ChatServer) -> None:
    asked = {"prompt": "the river", "seed": 5, "stream_options": {"include_usage": True}}
    whole = json.loads(post(server, "/v1/completions", asked)[1])
    pieces = read_events(post(server, "/v1/completions", asked | {"stream": True})[1])
    *texts, last, usage = pieces
    assert "".join(one["choices"][0]["text"] for one in texts) == whole["choices"][0]["text"]
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert len({one["id"] for one in pieces}) == 1


def test_a_text_ends_before_a_stop(server: ChatServer, chat: ChatModel) -> None:
    text = generate(chat, "the old", seed=1)
    stop = text[4:6]
    later = text[8:]
    asked = {"prompt": "the old", "seed": 1, "stop": [later, stop]}
    whole = json.loads(post(server, "/v1/completions", asked)[1])["choices"][0]
    assert (whole["text"], whole["finish_reason"]) == (text[: text.index(stop)], "stop")
    pieces = read_events(post(server, "/v1/completions", asked | {"stream": True})[1])
    assert "".join(one["choices"][0]["text"] for one in pieces) == whole["text"]


def test_a_chat_is_answered_in_its_template(
    server: ChatServer, chat: ChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "chats", Format())
    parts = [{"type": "text", "text": "so "}, {"type": "text", "text": "what?"}]
    messages = [{"role": "system", "content": "be old"}, {"role": "user", "content": parts}]
    asked = {"messages": messages, "max_completion_tokens": 7, "max_tokens": 3}
    found = json.loads(post(server, "/v1/chat/completions", asked)[1])
    assert found["object"] == "chat.completion"
    message = found["choices"][0]["message"]
    told = "system: be old\nuser: so what?\nassistant: "
    assert found["usage"]["prompt_tokens"] == len(told)
    assert message["role"] == "assistant"
    assert len(message["content"]) <= 7
    first, *pieces, last = read_events(
        post(server, "/v1/chat/completions", asked | {"stream": True})[1]
    )
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk"
    texts = [one["choices"][0]["delta"]["content"] for one in pieces]
    assert "".join(texts) == message["content"]
    assert last["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(("route", "body", "said"), [
    ("completions", {"prompt": "a", "n": 2}, "n=2 is not supported by this server. Leave it out."),
    ("completions", {"prompt": "a", "logprobs": 5}, "logprobs=5 is not supported"),
    ("completions", {"prompt": "a", "echo": True}, "echo=true is not supported"),
    ("completions", {"prompt": [1, 2]}, "prompt is not one text"),
    ("completions", {"prompt": ["a", "b"]}, "prompt is not one text"),
    ("completions", {"prompt": "a", "temperature": -1}, "temperature=-1: "),
    ("completions", {"prompt": "a", "max_tokens": 0}, "max_new_tokens=0: "),
    ("completions", {"prompt": "a", "stop": ["a"] * 5}, "stop is not one to 4 texts"),
    ("completions", {"prompt": "a", "stop": ""}, "stop is not one to 4 texts"),
    ("completions", {"prompt": "a" * 80}, "leaves no space for new tokens"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}]},
        "this model was not tuned on chats"),
])  # fmt: skip
def test_what_is_wrong_or_not_done_is_named(
    server: ChatServer, route: str, body: dict[str, Any], said: str
) -> None:
    status, content = post(server, f"/v1/{route}", body)
    assert status == 400
    error = json.loads(content)["error"]
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("messages", [None, [], ["a"], [{"role": "user", "content": [{"a": 1}]}]])
def test_messages_of_another_form_are_named(
    server: ChatServer, chat: ChatModel, monkeypatch: pytest.MonkeyPatch, messages: Any
) -> None:
    monkeypatch.setattr(chat, "chats", Format())
    status, content = post(server, "/v1/chat/completions", {"messages": messages})
    assert status == 400
    told = ("messages is no list", "a message has a part that is no text")
    assert json.loads(content)["error"]["message"].startswith(told)


def test_the_model_is_listed_and_other_pages_are_refused(server: ChatServer) -> None:
    for headers, status in (({}, 200), ({"Origin": "https://evil.example"}, 403)):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        connection.request("GET", "/v1/models", headers=headers)
        answer = connection.getresponse()
        assert answer.status == status
        content = answer.read()
        connection.close()
        if status == 200:
            assert [one["id"] for one in json.loads(content)["data"]] == ["tiny"]


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_is_found_wherever_pieces_are_cut(cut: int) -> None:
    text = "aabaabaac and more"
    sent: list[str] = []
    watch = StopWatch(["aabaac", "more"], sent.append)

    def add_pieces() -> None:
        for start in range(0, len(text), cut):
            watch.add(text[start : start + cut])

    with pytest.raises(StopFoundError):
        add_pieces()
    assert "".join(sent) == "aab"


def test_the_stop_that_comes_first_in_the_text_ends_it() -> None:
    sent: list[str] = []
    watch = StopWatch(["yz", "bc"], sent.append)
    with pytest.raises(StopFoundError):
        watch.add("abcxyz")
    assert sent == ["a"]


def test_what_only_begins_a_stop_is_sent_at_the_end() -> None:
    sent: list[str] = []
    watch = StopWatch(["stop"], sent.append)
    for piece in ("a s", "to"):
        watch.add(piece)
    assert "".join(sent) == "a "
    watch.flush()
    assert "".join(sent) == "a sto"
