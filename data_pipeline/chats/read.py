"""Read chats from JSON lines: a list of messages in each line.

A message is `{role, content}`, or `{from, value}` as in ShareGPT, whose human, gpt and bot are user
and assistant.

Invariants:
    - Every unusable line is counted with its reason.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.config.data import ChatConfig
from llmsys.data_pipeline.pairs.read import LineProblem, iter_raw_lines
from llmsys.data_pipeline.readers.messages import find_message_keys
from llmsys.errors import DataError
from llmsys.vocabulary.chat_template import ASSISTANT, BEGIN, END

ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT}
SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class ChatLine:
    """One line of a file: its messages, or the reason why it has none. `number` counts lines
    from 1.
    """

    number: int
    text: str
    messages: tuple[Mapping[str, Any], ...] = ()
    tools: object = None
    problem: LineProblem | None = None


def iter_chat_lines(file: Path, data: ChatConfig, controls: frozenset[str]) -> Iterator[ChatLine]:
    """Yield the lines of a file.

    Args:
        file: The file.
        data: Names of the fields.
        controls: Control tokens, which no message may spell.

    Raises:
        DataError: The file cannot be read.
    """
    if Path(file.name.removesuffix(".gz")).suffix not in SUFFIXES:
        raise DataError(
            f"{file}: chats are read from JSON lines (.jsonl, .jsonl.gz). Convert or rename it."
        )
    for number, raw in enumerate(iter_raw_lines(file), start=1):
        text = raw.decode(errors="replace").strip()
        if text:
            yield _parse_line(number, text, data, controls)


def _parse_line(number: int, text: str, data: ChatConfig, controls: frozenset[str]) -> ChatLine:
    try:
        row = json.loads(text)
        messages = row[data.messages_field]
        tools = row.get(data.tools_field)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _reject_line(
            number, text, "no_messages", f"the line is no object with {data.messages_field!r}"
        )
    if not isinstance(messages, list) or not messages:
        return _reject_line(
            number, text, "no_messages", f"{data.messages_field} is no list of messages"
        )
    parsed = [_parse_message(message) for message in messages]
    kept = tuple(message for message in parsed if message is not None)
    if len(kept) < len(parsed):
        reason = (
            f"message {parsed.index(None)} is not {{role, content}} or {{from, value}} with texts"
        )
        return _reject_line(number, text, "no_message", reason)
    if not any(message["role"] == ASSISTANT for message in kept):
        return _reject_line(number, text, "no_answer", "no message is of the assistant")
    if (spelled := _find_control([kept, tools], controls | {BEGIN, END})) is not None:
        return _reject_line(
            number, text, "control_token", f"a message spells the control token {spelled!r}"
        )
    try:
        json.dumps([kept, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:  # JSON can hold half of an emoji, as of texts that were cut
        return _reject_line(
            number, text, "surrogate", "a text has half of a surrogate pair, which no UTF-8 has"
        )
    return ChatLine(number, text, kept, tools)


def _reject_line(number: int, text: str, test: str, reason: str) -> ChatLine:
    return ChatLine(number, text, problem=LineProblem(test, None, None, reason))


def _parse_message(message: object) -> Mapping[str, Any] | None:
    """Return a message with `role`, `content` and all of its other fields, which templates may
    read; None if it is none.

    Without content a message must have tool calls. Roles of ShareGPT (`from`) get the names of
    templates.
    """
    if not isinstance(message, Mapping) or (keys := find_message_keys(list(message))) is None:
        return None
    role = message[keys[0]]
    content = message[keys[1]]
    is_content = isinstance(content, str | list) or (
        content is None and bool(message.get("tool_calls"))
    )
    if not isinstance(role, str) or not is_content:
        return None
    others = {name: value for name, value in message.items() if name not in keys}
    return {
        "role": ROLES.get(role, role) if keys[0] == "from" else role,
        "content": content,
    } | others


def _find_control(value: object, controls: frozenset[str]) -> str | None:
    """Return a control token that some text of a value spells."""
    if isinstance(value, str):
        return next((control for control in sorted(controls) if control in value), None)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return None
    return next(
        (found for one in value if (found := _find_control(one, controls)) is not None), None
    )
