"""Answer requests in the form of OpenAI's API, so that editors, evaluators and its client libraries
connect to a model on this machine.

Routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, each whole or as server-sent events
(https://platform.openai.com/docs/api-reference). What a request asks for and this server does not
do is an error that names it.
"""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from llmsys.config.train import GenerationConfig
from llmsys.errors import ConfigError
from llmsys.generate.chat_model import (
    ChatModel,
    build_generation_settings,
    read_messages,
)

Route = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: Route = "/v1/completions"
CHAT: Route = "/v1/chat/completions"
MODELS = "/v1/models"

# Our key by that of a request; `max_tokens` is the older of the two that chats have.
SETTINGS = {
    "max_completion_tokens": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
}
# Keys of a request that would change the answer, with the values that change nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
}
MAX_STOPS = 4

Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class CompletionRequest:
    """A request that has been checked.

    Attributes:
        prompt: The text to continue; of a chat empty.
        ids: Its tokens, with those before it.
        settings: How to sample.
        stops: Texts that end the answer and are no part of it.
        is_stream: Send pieces as they are generated.
        has_usage: Send the counts of tokens at the end of a stream.
    """

    prompt: str
    ids: list[int]
    settings: GenerationConfig
    stops: tuple[str, ...]
    is_stream: bool
    has_usage: bool


@dataclass(frozen=True)
class Completion:
    """A generated text: with the reason for its end and the counts of its tokens."""

    text: str
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int

    def to_usage(self) -> dict[str, int]:
        """Return the counts by the names of the API."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def list_models(chat: ChatModel) -> dict[str, Any]:
    """Return the answer to `/v1/models`: the model that is served.

    Args:
        chat: The model.

    Returns:
        The JSON object.
    """
    model = {"id": chat.config.run.name, "object": "model", "created": 0, "owned_by": "llmsys"}
    return {"object": "list", "data": [model]}


def build_error(message: str) -> dict[str, Any]:
    """Return an error in the form of the API.

    Args:
        message: What is wrong, and the next step.

    Returns:
        The JSON object.
    """
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    }


def parse_completion_request(
    chat: ChatModel, route: Route, request: Mapping[str, Any]
) -> CompletionRequest:
    """Check a request.

    Args:
        chat: The model.
        route: The route it was sent to.
        request: Its JSON object.

    Returns:
        What to generate.

    Raises:
        ConfigError: A value is out of range, or asks for what this server does not do.
        DataError: The chat template rejects the messages.
    """
    for key, harmless in UNSUPPORTED.items():
        if request.get(key) not in harmless:
            raise ConfigError(
                f"{key}={json.dumps(request[key])[:80]} is not supported by this server. Leave it "
                "out."
            )
    given = {ours: request[key] for key, ours in reversed(SETTINGS.items()) if key in request}
    settings = build_generation_settings(chat.config.generation, given)
    prompt = "" if route == CHAT else _read_prompt(request)
    options = request.get("stream_options") or {}
    return CompletionRequest(
        prompt=prompt,
        ids=_encode_chat(chat, request) if route == CHAT else chat.encode_prompt(prompt, settings),
        settings=settings,
        stops=_read_stops(request.get("stop")),
        is_stream=request.get("stream") is True,
        has_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _read_prompt(request: Mapping[str, Any]) -> str:
    prompt = request.get("prompt", "")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise ConfigError(
            "prompt is not one text. Send one request for each prompt, and texts, not ids."
        )
    return prompt


def _encode_chat(chat: ChatModel, request: Mapping[str, Any]) -> list[int]:
    if chat.chats is None:
        raise ConfigError(
            "this model was not tuned on chats and has no chat template. Use "
            f"{COMPLETIONS}, or start the server with generation.format=chat."
        )
    messages = request.get("messages")
    if isinstance(messages, list):
        messages = [_join_parts(message) for message in messages]
    return chat.encode_messages(read_messages({"messages": messages}))


def _join_parts(message: Any) -> Any:
    """Return a message whose content is one text: clients also send lists of parts."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    texts = []
    for part in parts:
        if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise ConfigError("a message has a part that is no text. Send text alone.")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def _read_stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    is_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not is_list or not all(isinstance(one, str) and one for one in stops):
        raise ConfigError(f"stop is not one to {MAX_STOPS} texts. Correct it, or leave it out.")
    return tuple(stops)


class StopFoundError(Exception):
    """A text of `stop` was generated."""


class StopWatch:
    """A filter of pieces that ends a text at the first of some stops.

    What may be the beginning of a stop is held back.
    """

    def __init__(self, stops: Sequence[str], on_text: Callable[[str], None]) -> None:
        self._stops = stops
        self._on_text = on_text
        self._held = ""

    def add(self, piece: str) -> None:
        """Add a piece.

        Args:
            piece: The text of a token.

        Raises:
            StopFoundError: The text has a stop; what is before it has been sent.
        """
        self._held += piece
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._send(min(places))
            raise StopFoundError
        self._send(len(self._held) - self._count_held_back())

    def flush(self) -> None:
        """Send what was held back."""
        self._send(len(self._held))

    def _count_held_back(self) -> int:
        """Return the length of the longest end of the text that begins a stop."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, len(stop))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )

    def _send(self, count: int) -> None:
        text, self._held = self._held[:count], self._held[count:]
        if text:
            self._on_text(text)


def complete_request(
    chat: ChatModel, asked: CompletionRequest, on_text: Callable[[str], None]
) -> Completion:
    """Generate the text of a request.

    Args:
        chat: The model.
        asked: The request.
        on_text: Receives pieces of text as soon as they are certain; an error in it ends the text.

    Returns:
        The text.

    Raises:
        DataError: The prompt fills the context.
    """
    pieces: list[str] = []

    def send_text(text: str) -> None:
        pieces.append(text)
        on_text(text)

    watch = StopWatch(asked.stops, send_text)
    count = 0

    def add_piece(piece: str, logits_V: torch.Tensor, token: int) -> None:
        nonlocal count
        count += 1
        watch.add(piece)

    is_stopped = False
    try:
        watch.add(chat.generate_text(asked.prompt, asked.ids, asked.settings, add_piece))
    except StopFoundError:
        is_stopped = True
    if not is_stopped:
        watch.flush()
    room = chat.model.config.max_position_embeddings - len(asked.ids)
    is_full = count >= min(asked.settings.max_new_tokens, room)
    reason: Literal["stop", "length"] = "length" if is_full and not is_stopped else "stop"
    return Completion("".join(pieces), reason, len(asked.ids), count)


def build_completion(chat: ChatModel, route: Route, asked: CompletionRequest) -> dict[str, Any]:
    """Generate a text and return it in the form of the API.

    Args:
        chat: The model.
        route: The route of the request.
        asked: The request.

    Returns:
        The JSON object.
    """
    done = complete_request(chat, asked, lambda text: None)
    head = _build_head(chat, route, is_piece=False)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": done.finish_reason}
    if route == CHAT:
        choice["message"] = {"role": "assistant", "content": done.text}
    else:
        choice["text"] = done.text
    return {**head, "choices": [choice], "usage": done.to_usage()}


def stream_completion(chat: ChatModel, route: Route, asked: CompletionRequest, send: Send) -> None:
    """Generate a text and send its pieces in the form of the API.

    Args:
        chat: The model.
        route: The route of the request.
        asked: The request.
        send: Receives each JSON object; an error in it ends the text.
    """
    head = _build_head(chat, route, is_piece=True)

    def send_choice(changes: dict[str, Any], reason: str | None = None) -> None:
        send({**head, "choices": [{"index": 0, **changes, "finish_reason": reason}]})

    def send_text(text: str) -> None:
        send_choice({"delta": {"content": text}} if route == CHAT else {"text": text})

    if route == CHAT:
        send_choice({"delta": {"role": "assistant", "content": ""}})
    done = complete_request(chat, asked, send_text)
    send_choice({"delta": {}} if route == CHAT else {"text": ""}, done.finish_reason)
    if asked.has_usage:
        send({**head, "choices": [], "usage": done.to_usage()})


def _build_head(chat: ChatModel, route: Route, *, is_piece: bool) -> dict[str, Any]:
    kind = "text_completion"
    if route == CHAT:
        kind = "chat.completion.chunk" if is_piece else "chat.completion"
    prefix = "chatcmpl" if route == CHAT else "cmpl"
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": chat.config.run.name,
    }


def format_event(values: Mapping[str, Any] | None) -> bytes:
    """Format a server-sent event.

    Args:
        values: The JSON object; None: the end of the stream.

    Returns:
        The bytes of the event.
    """
    text = "[DONE]" if values is None else json.dumps(values)
    return f"data: {text}\n\n".encode()
