"""Chats as text by hand, and which of their tokens are learnt: no template, no stored ids."""

from collections.abc import Sequence
from typing import Any, NamedTuple

IGNORED = -100


class Piece(NamedTuple):
    """A part of a chat's text, and whether the assistant writes it."""

    text: str
    is_answer: bool


def render_chatml(messages: Sequence[dict[str, Any]]) -> list[Piece]:
    """The pieces of a chat in ChatML: each turn is opened with its role, and closed by whoever
    speaks.
    """
    pieces = []
    for message in messages:
        pieces.append(Piece(f"<|im_start|>{message['role']}\n", is_answer=False))
        pieces.append(
            Piece(f"{message['content']}<|im_end|>\n", is_answer=message["role"] == "assistant")
        )
    return pieces


class LearntChat(NamedTuple):
    """The inputs of a chat, and the target at each of them: the next token where it is the
    assistant's.
    """

    inputs: tuple[int, ...]
    targets: tuple[int, ...]


def build_learnt_chat(tokenizer: Any, pieces: Sequence[Piece]) -> LearntChat:
    """The inputs and targets of a chat; after its last token comes nothing that is learnt.

    Args:
        tokenizer: Of the package `tokenizers`.
        pieces: The text.
    """
    owner = [piece.is_answer for piece in pieces for _ in piece.text]
    encoded = tokenizer.encode("".join(piece.text for piece in pieces), add_special_tokens=False)
    is_answer = [any(owner[begin:end]) for begin, end in encoded.offsets]
    following = zip(encoded.ids[1:], is_answer[1:], strict=True)
    targets = [token if learnt else IGNORED for token, learnt in following]
    return LearntChat(tuple(encoded.ids), (*targets, IGNORED))
