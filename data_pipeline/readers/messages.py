"""Format the messages of a chat as the text of one document, for pretraining.

Reads lists of `{role, content}` (OpenAI, Hugging Face) or of `{from, value}` (ShareGPT). `content`
is text, or a list of parts of which each has `text`. A message becomes `role: content`; messages
are separated by an empty line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

KEYS = (("role", "content"), ("from", "value"))


def find_message_keys(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of role and content.

    Args:
        names: Fields of a message.

    Returns:
        The two names; None if it is no message.
    """
    return next((keys for keys in KEYS if keys[0] in names and keys[1] in names), None)


def is_chat(value: object) -> bool:
    """Return whether a value is a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(one, Mapping) and find_message_keys(list(one)) is not None for one in value
        )
    )


def format_chat(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of a chat.

    Args:
        messages: messages for which `is_chat` holds.

    Returns:
        The text; None if a message has content other than text, such as an image.
    """
    lines = []
    for message in messages:
        keys = find_message_keys(list(message))
        assert keys is not None
        role = message[keys[0]]
        content = _read_content(message[keys[1]])
        if not isinstance(role, str) or content is None:
            return None
        lines.append(f"{role}: {content}")
    return "\n\n".join(lines)


def _read_content(content: Any) -> str | None:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None
