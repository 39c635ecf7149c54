"""Serve a page of this machine on which a person talks to a model: text arrives token by token,
with probabilities.

Binds to 127.0.0.1 only. A request needs the host name of this machine and, where the browser sends
one, the page's own origin, so that no other page that is open in the browser can use the model.

Invariants:
- One text is generated at a time. A page that is closed ends its text.
- Probabilities are those of the model, before temperature and filters.
"""

import json
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.config.train import GenerationConfig
from llmsys.errors import ConfigError, LlmsysError
from llmsys.generate.chat_format import load_chat_format
from llmsys.generate.prompt_completion import TextStreamer, build_decoding_params
from llmsys.generate.text_generation import generate_texts
from llmsys.model.transformer import Transformer
from llmsys.train.run_data import get_prefix_ids
from llmsys.vocabulary.tokenizer import Tokenizer

ADDRESS = "127.0.0.1"
MAX_REQUEST_BYTES = 1 << 20
ALTERNATIVES = 6
CONTROLS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
    "seed",
)

Send = Callable[[dict[str, Any]], None]


class ChatModel:
    """A model, its tokenizer and the settings that a page starts with."""

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: RunConfig) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.config = config
        self.chats = load_chat_format(config)
        self._lock = threading.Lock()

    def continue_text(self, request: dict[str, Any], send: Send) -> None:
        """Generate a continuation and send {text, probability, top} for each token, then {end}.

        Args:
            request: `text`, and values of `CONTROLS`; of a model that was tuned on chats `messages`
                instead of `text`.
            send: receives each message; an error in it ends the text.

        Raises:
            ConfigError: a setting is out of range.
            DataError: the text fills the context.
        """
        settings = build_generation_settings(self.config.generation, request)
        prompt = str(request.get("text", ""))
        with self._lock:  # the tokenizer takes control tokens as such meanwhile
            ids = (
                None if self.chats is None else [self.chats.encode_messages(read_messages(request))]
            )
        stream = TextStreamer(self.tokenizer, [prompt], lambda _, piece: pieces.append(piece), ids)
        pieces: list[str] = []

        def send_token(_: int, logits_V: Tensor, token: int) -> None:
            pieces.clear()
            stream(0, token)
            send({"text": "".join(pieces)} | describe_choice(self.tokenizer, logits_V, token))

        with self._lock:
            (text,) = generate_texts(
                self.model,
                self.tokenizer,
                [prompt],
                max_new_tokens=settings.max_new_tokens,
                decoding=build_decoding_params(settings),
                seed=settings.seed,
                prefix_ids=get_prefix_ids(settings, self.tokenizer),
                prompt_ids=ids,
                stop_ids=() if self.chats is None else self.chats.stop_ids,
                on_logits=send_token,
            )
        pieces.clear()
        stream.flush([text])  # a character whose bytes were not complete
        send({"end": "".join(pieces)})


def read_messages(request: dict[str, Any]) -> list[dict[str, str]]:
    """Read the messages of a request.

    Args:
        request: The JSON object of the request: `messages`, or `text` as one message of the
            user.

    Returns:
        Messages with `role` and `content`.

    Raises:
        ConfigError: There are none.
    """
    messages = request.get("messages", [{"role": "user", "content": str(request.get("text", ""))}])
    if (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(one, dict)
            and isinstance(one.get("role"), str)
            and isinstance(one.get("content"), str)
            for one in messages
        )
    ):
        return messages
    raise ConfigError("messages is no list of {role, content}. Send one or more, or `text`.")


def parse_request(content: bytes) -> dict[str, Any] | None:
    """Parse the body of a request.

    Args:
        content: The bytes.

    Returns:
        The object; None for other JSON, for what is none, and for halves of surrogate pairs, which
        no tokenizer takes.
    """
    try:
        request = json.loads(content)
        json.dumps(request, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def build_generation_settings(
    defaults: GenerationConfig, request: dict[str, Any]
) -> GenerationConfig:
    """Build the settings of one answer.

    Args:
        defaults: The settings of the run.
        request: The JSON object of the request; values of `CONTROLS` replace the defaults.

    Returns:
        The settings.

    Raises:
        ConfigError: A value is out of range. The message names it.
    """
    given = {name: request[name] for name in CONTROLS if request.get(name) is not None}
    try:
        # beams have no single next token to show
        return GenerationConfig.model_validate(defaults.model_dump() | given | {"num_beams": 1})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{name}={first['input']!r}: {first['msg'].lower()}. Correct it, or empty the field."
        ) from None


def describe_choice(tokenizer: Tokenizer, logits_V: Tensor, token: int) -> dict[str, Any]:
    """Return the probability of a token and the most likely ones.

    Args:
        tokenizer: names the tokens.
        logits_V: the model's logits.
        token: the chosen token.

    Returns:
        `probability`, and `top`: [text, probability] of the `ALTERNATIVES` most likely tokens.
    """
    probability_V = logits_V.float().softmax(-1)
    values, ids = probability_V.topk(min(ALTERNATIVES, len(probability_V)))
    top = [
        [tokenizer.decode([number]), round(value, 5)]
        for value, number in zip(values.tolist(), ids.tolist(), strict=True)
    ]
    return {"probability": round(float(probability_V[token]), 5), "top": top}


def read_page() -> str:
    """Return the page, with the places of its nonce and its settings."""
    return resources.files("llmsys.generate").joinpath("chat.html").read_text("utf-8")


class ChatServer(ThreadingHTTPServer):
    """The server of one model; `port` 0 takes a free one."""

    daemon_threads = True

    def __init__(self, chat: ChatModel, port: int) -> None:
        """Bind to this machine. Raises ConfigError when the port is taken."""
        self.chat = chat
        try:
            super().__init__((ADDRESS, port), _ChatHandler)
        except OSError as error:
            raise ConfigError(
                f"port {port} cannot be used ({error.strerror}). Give another one: --port 0"
            ) from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def is_own_request(self, host: str, origin: str | None) -> bool:
        """Return whether a request names this server and comes from its page, or from no page."""
        names = {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}
        return host in names and (origin is None or origin.removeprefix("http://") in names)


class _ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_GET(self) -> None:
        if self._is_rejected():
            return
        if self.path.partition("?")[0] != "/":
            self._send(404, b"not found", "text/plain")
            return
        chat = self.server.chat
        nonce = secrets.token_urlsafe(16)
        shown = {name: getattr(chat.config.generation, name) for name in CONTROLS}
        start = {"name": chat.config.run.name, "controls": shown, "chat": chat.chats is not None}
        text = read_page()
        # a closing tag in a run's name would end the script
        data = json.dumps(start).replace("<", "\\u003c")
        page = text.replace("{{nonce}}", nonce).replace("{{start}}", data)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
            "connect-src 'self'"
        )
        self._send(
            200,
            page.encode(),
            "text/html; charset=utf-8",
            policy + "; img-src data:; frame-ancestors 'none'",
        )

    def do_POST(self) -> None:
        if self._is_rejected():
            return
        length = self.headers.get("Content-Length") or ""
        # Digits of other scripts, which int() takes, are no length.
        size = int(length) if length.isascii() and length.isdigit() and len(length) < 20 else 0
        is_json = self.headers.get_content_type() == "application/json"
        if self.path != "/generate" or not is_json or not 0 < size <= MAX_REQUEST_BYTES:
            self._send(400, b"send JSON to /generate", "text/plain")
            return
        request = parse_request(self.rfile.read(size))
        if request is None:
            self._send(400, b"send a JSON object of valid Unicode", "text/plain")
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        try:
            self._stream(request)
        except OSError:  # the page was closed
            self.close_connection = True

    def _stream(self, request: dict[str, Any]) -> None:
        def send(message: dict[str, Any]) -> None:
            self.wfile.write(json.dumps(message).encode() + b"\n")
            self.wfile.flush()

        try:
            self.server.chat.continue_text(request, send)
        except LlmsysError as error:
            send({"error": str(error)})

    def _is_rejected(self) -> bool:
        if self.server.is_own_request(self.headers.get("Host", ""), self.headers.get("Origin")):
            return False
        self._send(
            403, b"this page is for the machine it runs on: open it as 127.0.0.1", "text/plain"
        )
        return True

    def _send(
        self, status: int, content: bytes, kind: str, policy: str = "default-src 'none'"
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log no requests."""
