"""Held-out chats as separate rows, for evaluation: every answer is scored after all that comes
before it.

Invariants:
- The rows do not depend on the number of ranks or on the packing of training.
"""

from collections.abc import Iterator

import numpy as np
import torch

from llmsys.data.batch import IGNORED, Batch
from llmsys.data.packed_windows import PADDING
from llmsys.dataset.token_shards import TokenShards
from llmsys.errors import DataError
from llmsys.vocabulary.chat_tokens import SplitTokens, StoredChats
from llmsys.vocabulary.tokenizer import Tokenizer

# B rows, T positions


class HeldoutChats:
    """The chats of a held-out split, sorted by length to reduce padding.

    A chat without a token of an answer among its first `length` + 1 is left out, and later tokens
    of long ones are.

    Attributes:
        tokens: Tokens of answers that are scored.
        text_bytes: UTF-8 bytes of their text.
    """

    def __init__(
        self, shards: TokenShards, tokenizer: Tokenizer, *, length: int, max_tokens: int = 0
    ) -> None:
        """Read the chats into memory.

        Args:
            shards: The held-out split.
            tokenizer: The tokenizer of the split.
            length: Positions to predict in a row; later tokens of longer chats are left out.
            max_tokens: Only the first chats with at most so many tokens, but at least one chat.
                Default: 0, all.

        Raises:
            DataError: No chat has text of an answer among its first `length` + 1 tokens.
        """
        chats = StoredChats(tokenizer.vocab_size, tokenizer.eos_id)
        lengths, _ = shards.read_leading_sizes(max_tokens)
        count = len(lengths)
        if max_tokens:
            count = max(1, int(np.searchsorted(np.cumsum(lengths), max_tokens, side="right")))
        found = [
            chats.split(shards.get_tokens(number)[:-1][: length + 1]) for number in range(count)
        ]
        self.tokenizer = tokenizer
        self.rows: list[SplitTokens] = sorted(
            (row for row in found if row.has_loss.any()),
            key=lambda row: (len(row.ids), row.ids.tolist()),
        )
        self.num_rows = len(self.rows)
        self.tokens = sum(int(row.has_loss.sum()) for row in self.rows)
        self.text_bytes = sum(map(len, self.iter_texts()))
        if not self.text_bytes:
            raise DataError(
                f"None of {count:,} held-out chats has text of an answer among its first "
                f"{length:,} tokens. Raise evaluation.sequence_length or evaluation.max_tokens, "
                "or hold out more chats."
            )

    def get_batch(self, first: int, count: int) -> Batch:
        """Return consecutive rows; rows after the last have no targets.

        Args:
            first: number of the first row, counted from 0.
            count: rows of the batch.
        """
        rows = self.rows[first : first + count]
        length = max((len(row.ids) - 1 for row in rows), default=1)
        tokens_BT = np.zeros((count, length), np.int64)
        targets_BT = np.full((count, length), IGNORED, np.int64)
        documents_BT = np.full((count, length), PADDING, np.int64)
        documents_BT[len(rows) :] = 0  # a row of padding alone would have no key to attend to
        for number, row in enumerate(rows):
            size = len(row.ids) - 1
            tokens_BT[number, :size] = row.ids[:-1]
            targets_BT[number, :size] = np.where(row.has_loss[1:], row.ids[1:], IGNORED)
            documents_BT[number, :size] = 0
        return Batch(
            torch.from_numpy(tokens_BT),
            torch.from_numpy(targets_BT),
            torch.from_numpy(documents_BT),
        )

    def iter_texts(self) -> Iterator[bytes]:
        """Yield the UTF-8 text of the answers of each chat."""
        for row in self.rows:
            yield self.tokenizer.decode(row.ids[row.has_loss].tolist()).encode()
