"""Ids of chats in token files: which of them have a loss, and where a chat ends, in one number
each.

Written by `llmsys prepare` for data.kind=chat, and read wherever token ids are.

Invariants:
- With V ids in the tokenizer, t is a token of an answer, V + t a token without a loss, and 2V the
  border that closes a chat, instead of the end-of-sequence id. Datasets of documents have ids below
  V alone.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class SplitTokens(NamedTuple):
    """Token ids, and two masks of their shape.

    Attributes:
        ids: Ids of the tokenizer, int64.
        has_loss: True for tokens of answers, and for all tokens of documents.
        is_border: True for the id that closes a chat.
    """

    ids: NDArray[np.int64]
    has_loss: NDArray[np.bool_]
    is_border: NDArray[np.bool_]


class StoredChats(NamedTuple):
    """The numbers that the ids of token files are split by.

    Attributes:
        vocab_size: Number of ids of the tokenizer.
        eos_id: Id that replaces a border.
    """

    vocab_size: int
    eos_id: int

    def split(self, stored: NDArray[np.integer[Any]]) -> SplitTokens:
        """Split stored ids into ids of the tokenizer and masks.

        Args:
            stored: Ids as token files of chats have them, of any shape: below `vocab_size` with a
                loss, from `vocab_size` on without one, and 2 · `vocab_size` for a border.

        Returns:
            Ids and masks of the same shape.
        """
        ids = stored.astype(np.int64)
        has_loss = ids < self.vocab_size
        is_border = ids == 2 * self.vocab_size
        return SplitTokens(
            np.where(is_border, self.eos_id, ids - np.where(has_loss, 0, self.vocab_size)),
            has_loss,
            is_border,
        )


def count_stored_ids(vocab_size: int) -> int:
    """Return the number of different ids in token files of chats.

    Args:
        vocab_size: Number of ids of the tokenizer.

    Returns:
        Every stored id is smaller.
    """
    return 2 * vocab_size + 1


def join_chat_tokens(
    ids: Sequence[int], is_answer: Sequence[bool], vocab_size: int
) -> NDArray[np.int64]:
    """Return the ids of a chat as token files hold them, closed by the border.

    Args:
        ids: Ids of the tokenizer.
        is_answer: Whether each is of an answer. The first token of a chat has no loss: nothing
            comes before it.
        vocab_size: Number of ids of the tokenizer.

    Returns:
        Ids below `count_stored_ids`, (T + 1,).
    """
    has_loss = np.asarray(is_answer, bool)
    has_loss[:1] = False
    return np.append(np.asarray(ids, np.int64) + np.where(has_loss, 0, vocab_size), 2 * vocab_size)
