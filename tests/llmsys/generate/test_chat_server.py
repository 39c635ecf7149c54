"""Laws of the local page: it answers this machine alone, streams what `generate` gives, and
shows its probabilities.
"""

import html
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from llmsys.generate import chat_server
from llmsys.generate.chat_model import ChatModel, Send
from llmsys.generate.chat_server import ChatServer
from llmsys.generate.prompt_completion import build_decoding_params
from llmsys.generate.text_generation import generate_texts
from tests.helpers.browser import LOOKS, needs_chromium, open_page
from tests.helpers.chat_servers import LETTERS, build_chat_model, serve


@pytest.fixture
def chat() -> ChatModel:
    return build_chat_model("tiny </script>")


@pytest.fixture
def server(chat: ChatModel) -> Iterator[ChatServer]:
    with serve(chat) as made:
        yield made


def request(server: ChatServer, body: Any, **headers: str) -> tuple[int, list[dict[str, Any]]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    head = {"Content-Type": "application/json"} | headers
    connection.request(
        "POST", "/generate", body if isinstance(body, str) else json.dumps(body), head
    )
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, [
        json.loads(line) for line in content.splitlines()
    ] if answer.status == 200 else []


def test_a_text_is_streamed_with_the_models_probabilities(
    server: ChatServer, chat: ChatModel
) -> None:
    asked = {"text": "the river", "temperature": 0.7, "top_k": 5, "seed": 3, "max_new_tokens": 9}
    status, lines = request(server, asked)
    assert status == 200
    settings = chat.config.generation.model_copy(
        update={key: asked[key] for key in asked if key != "text"}
    )
    (expected,) = generate_texts(
        chat.model,
        chat.tokenizer,
        ["the river"],
        max_new_tokens=9,
        decoding=build_decoding_params(settings),
        seed=3,
    )
    *tokens, end = lines
    assert "".join(token["text"] for token in tokens) + end["end"] == expected
    ids = [0, *chat.tokenizer.encode("the river" + expected)]
    with torch.no_grad():
        probability_TV = chat.model(torch.tensor([ids]))[0, :, : len(LETTERS)].softmax(-1)
    for place, token in enumerate(tokens, len(ids) - 1 - len(tokens)):
        # one forward pass over the whole text gives the same, before temperature and top-k
        assert token["probability"] == pytest.approx(
            float(probability_TV[place, ids[place + 1]]), abs=2e-5
        )
        assert [share for _, share in token["top"]] == sorted(
            (share for _, share in token["top"]), reverse=True
        )
        assert token["top"][0][1] == pytest.approx(float(probability_TV[place].max()), abs=2e-5)


def test_wrong_settings_and_requests_are_answered(server: ChatServer) -> None:
    ((error,),) = (request(server, {"text": "a", "top_p": 3})[1],)
    assert error["error"].startswith("top_p=3: input should be less than or equal to 1. Correct it")
    ((error,),) = (request(server, {"text": "a" * 80})[1],)
    assert "context" in error["error"]
    assert request(server, "[]")[0] == 400
    assert request(server, "{")[0] == 400
    assert request(server, "{}", **{"Content-Type": "text/plain"})[0] == 400


@pytest.mark.parametrize("body", ["[" * 100_000, '{"text": "\\ud800"}', "{", "[]", "\x00"])
def test_a_body_that_is_no_object_of_text_is_refused(server: ChatServer, body: str) -> None:
    assert request(server, body) == (400, [])
    assert request(server, {"text": "a", "max_new_tokens": 1})[0] == 200


@pytest.mark.parametrize("length", ["many", "-1", "1e3", "²", "9" * 30])
def test_a_length_that_is_no_number_is_refused(server: ChatServer, length: str) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as opened:
        head = f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        opened.sendall(head.encode())
        assert opened.recv(4096).split(b"\r\n")[0].split()[1] == b"400"


def test_no_other_page_and_no_other_machine_can_use_it(server: ChatServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert request(server, {"text": "a"}, Origin="https://evil.example")[0] == 403
    # a name that an attacker points to 127.0.0.1
    assert request(server, {"text": "a"}, Host=f"evil.example:{server.server_port}")[0] == 403
    assert request(server, {"text": "a"}, Origin=server.url.rstrip("/"))[0] == 200


@needs_chromium
@pytest.mark.browser
def test_the_page_shows_tokens_and_their_alternatives(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = """
      generate().then(() => {
        const token = document.querySelectorAll("#tokens .token")[1];
        token.click();
        document.body.dataset.chosen = "1";
      });
    })();
    </script>"""
    settings = build_decoding_params(server.chat.config.generation)
    model = server.chat.model, server.chat.tokenizer
    (expected,) = generate_texts(
        *model, ["the old river"], max_new_tokens=12, decoding=settings, seed=0
    )
    assert len(expected) > 2
    page = chat_server.read_page()
    monkeypatch.setattr(chat_server, "read_page", lambda: page.replace("})();\n</script>", use))
    for width, dark in LOOKS:
        opened = open_page(
            f"{server.url}#text=the+old+river",
            width,
            dark=dark,
            ready="document.body.dataset.chosen === '1'",
        )
        assert opened.console == []
        assert opened.defects == []
        tokens = re.findall(r'class="token"[^>]*>([^<]*)<', opened.dom)
        assert html.unescape("".join(tokens)) == expected
        assert 'data-state="ready"' in opened.dom
        assert opened.dom.count("<tr>") == 6
        assert "<title>tiny &lt;/script&gt;: llmsys chat</title>" in opened.dom


class Answers(ChatModel):
    """A model that was tuned on chats and answers at once, with a space before each answer; it
    keeps the requests.
    """

    requests: list[list[dict[str, str]]]

    def continue_text(self, request: dict[str, Any], send: Send) -> None:
        self.requests.append(request["messages"])
        for text in (" It is", " 5."):
            send({"text": text, "probability": 0.75, "top": [[text, 0.75], [" no", 0.25]]})
        send({"end": ""})


@needs_chromium
@pytest.mark.browser
def test_the_page_keeps_a_chat_until_a_new_one_begins(
    chat: ChatModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = """
      (async () => {
        for (const text of ["What is 2 plus 3?", "Thanks"]) {
          find("prompt").value = text;
          await generate();
        }
        document.querySelectorAll("#tokens .token")[0].click();
        const all = [...document.querySelectorAll("body *")];
        const shown = {
          wide: all.filter((one) => one.getBoundingClientRect().right > innerWidth + 1).length,
          words: [...document.querySelectorAll("button, #purpose, label[for]")].map(
            (one) => one.textContent),
          text: find("text").textContent, top: find("top").textContent,
        };
        find("take").click();
        find("prompt").value = "Once more";
        await generate();
        document.body.dataset.shown = JSON.stringify(shown);
      })();
    })();
    </script>"""
    page = chat_server.read_page()
    monkeypatch.setattr(chat_server, "read_page", lambda: page.replace("})();\n</script>", use))
    answers = Answers(chat.model, chat.tokenizer, chat.config)
    monkeypatch.setattr(answers, "chats", object())
    answers.requests = []
    with ChatServer(answers, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = open_page(server.url, 390, ready="document.body.dataset.shown")
        server.shutdown()
    assert opened.console == []
    found = re.search(r'data-shown="([^"]*)"', opened.dom)
    assert found is not None
    shown = json.loads(html.unescape(found[1]))
    assert shown["wide"] == 0
    assert shown["words"] == [
        "answers your messages, on this machine",
        "Your message",
        "Send",
        "Stop",
        "New chat",
    ]
    turns = "user: What is 2 plus 3?\nassistant: It is 5.\nuser: Thanks\nassistant:  It is 5."
    assert (shown["text"], shown["top"]) == (turns, " It is75.0 % no25.0 %")
    first, answer = (
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "It is 5."},
    )
    second, third = ({"role": "user", "content": text} for text in ("Thanks", "Once more"))
    assert answers.requests == [[first], [first, answer, second], [third]]
