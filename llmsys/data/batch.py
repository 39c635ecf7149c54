"""The batch of one forward pass: token ids, targets, document numbers, and a source in an
encoder-decoder.

`compute_batch_digest` identifies the rows that a step trained on in 64 bits, for the log and for
replay.

Invariants:
- The digest is a sum modulo 2^64 over rows. It does not depend on the order of rows, the number of
  ranks or the size of micro-batches; ranks add up their sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmsys.data.packed_windows import PADDING, WindowBatch
from llmsys.data.shuffle import hash_splitmix64
from llmsys.data.target_documents import TargetDocuments
from llmsys.model.document_lengths import DocumentLengths, build_document_lengths
from llmsys.vocabulary.chat_tokens import StoredChats

# B sequences, T positions, S source positions

# Target without a loss, as in torch's cross entropy.
IGNORED = -100


class TokenCounts(NamedTuple):
    """Numbers of a batch that a step divides its losses by."""

    valid_targets: int
    tokens: int
    source_tokens: int
    labelled_pairs: int


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens and their targets.

    Targets are the next tokens; of a masked text the chosen tokens; of a classifier the labels, (B,
    1). In an encoder-decoder, tokens and targets are those of the translation.

    Attributes:
        tokens_BT: Token ids.
        targets_BT: Targets; IGNORED where a position has no loss.
        documents_BT: Document number of each token, PADDING where there is none; None: one document
            per row.
        source_BS: Token ids of the source.
        source_documents_BS: Document numbers of the source.
        token_types_BT: Segment of each token.
        next_sentence_B: 0 where the second segment follows the first, 1 where it does not, IGNORED:
            not known.
        predicted_BP: Positions to predict in this order, negative: none (XLNet). Targets are
            theirs, (B, P).
        document_lengths: Lengths of the documents, see `count_documents`.
        source_document_lengths: Lengths of the documents of the source.
        target_documents: Document of each target, where losses are recorded by document.
        real_BT: False at padding, for batches whose padding has no document number. None:
            `documents_BT` marks it.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    documents_BT: Tensor | None = None
    source_BS: Tensor | None = None
    source_documents_BS: Tensor | None = None
    token_types_BT: Tensor | None = None
    next_sentence_B: Tensor | None = None
    predicted_BP: Tensor | None = None
    real_BT: Tensor | None = None
    document_lengths: DocumentLengths | None = None
    source_document_lengths: DocumentLengths | None = None
    target_documents: TargetDocuments | None = None

    @property
    def num_valid_targets(self) -> int:
        """Number of targets with a loss."""
        return self.token_counts.valid_targets

    @property
    def num_tokens(self) -> int:
        """Number of tokens that are not padding; in an encoder-decoder those of the target."""
        return self.token_counts.tokens

    @property
    def num_source_tokens(self) -> int:
        """Number of source tokens that are not padding; 0 without a source."""
        return self.token_counts.source_tokens

    @cached_property
    def token_counts(self) -> TokenCounts:
        """The four counts. `map_tensors` and `to` carry them along, so that nobody waits for a
        device to count.
        """
        real_BT = self.real_BT
        if real_BT is None and self.documents_BT is not None:
            real_BT = self.documents_BT >= 0
        tokens = self.tokens_BT.numel() if real_BT is None else int(real_BT.sum())
        if self.source_documents_BS is not None:
            source_tokens = int((self.source_documents_BS >= 0).sum())
        else:
            source_tokens = 0 if self.source_BS is None else self.source_BS.numel()
        pairs = 0 if self.next_sentence_B is None else int((self.next_sentence_B != IGNORED).sum())
        return TokenCounts(int((self.targets_BT != IGNORED).sum()), tokens, source_tokens, pairs)

    def count_documents(self) -> Self:
        """Count the documents for attention on an accelerator, which takes their lengths. On the
        host, by the thread that reads ahead: a count on the device would make the host wait for
        it.

        Returns:
            The batch with the lengths of its documents; itself where it has none or they are
            counted.
        """
        counted: dict[str, Any] = {
            name: build_document_lengths(documents)
            for name, documents, lengths in (
                ("document_lengths", self.documents_BT, self.document_lengths),
                ("source_document_lengths", self.source_documents_BS, self.source_document_lengths),
            )
            if documents is not None and lengths is None
        }
        return replace(self, **counted) if counted else self

    def to_model_inputs(self) -> dict[str, Tensor | DocumentLengths]:
        """Return the arguments of the model's forward, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            for name, value in named.items()
            if name not in ("targets_BT", "target_documents") and value is not None
        }

    def to(self, device: torch.device) -> Self:
        """Copy the batch to a device.

        Args:
            device: The device. For an accelerator the documents are counted on the host before.

        Returns:
            The batch there, with its counts.
        """
        batch = self if device.type == "cpu" else self.count_documents()
        return batch.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Change every tensor of the batch.

        Args:
            change: Called with each tensor, always in the same order.

        Returns:
            A copy with the results.
        """
        changed: dict[str, Any] = {
            name: value.map_tensors(change) if isinstance(value, DocumentLengths) else change(value)
            for name, value in self.to_model_inputs().items()
        }
        if self.target_documents is not None:
            changed["target_documents"] = self.target_documents.map_tensors(change)
        moved = replace(self, targets_BT=change(self.targets_BT), **changed)
        # Into the cache of the property: to count moved tensors would wait for their device.
        moved.__dict__["token_counts"] = self.token_counts
        return moved


def build_batch(
    rows: WindowBatch, *, separate_documents: bool, chats: StoredChats | None = None
) -> Batch:
    """Build a batch from windows.

    Args:
        rows: Windows of T + 1 tokens.
        separate_documents: Number the documents, so that a token sees its own only.
        chats: Meaning of stored ids: targets without a loss are ignored, and no chat sees the
            border before it.

    Returns:
        The batch, with T positions.
    """
    if chats is not None:
        return _build_chat_batch(rows, chats)
    # Copied by numpy: torch would start threads that compete with training.
    tokens_BT, targets_BT, documents_BT = (
        torch.from_numpy(np.ascontiguousarray(array))
        for array in (rows.tokens[:, :-1], rows.tokens[:, 1:], rows.documents[:, :-1])
    )
    # rarely, and torch would take half of this function's time
    if (rows.documents == PADDING).any():
        targets_BT = targets_BT.masked_fill(documents_BT == PADDING, IGNORED)
    return Batch(tokens_BT, targets_BT, documents_BT if separate_documents else None)


def _build_chat_batch(rows: WindowBatch, chats: StoredChats) -> Batch:
    tokens, has_loss, is_border = chats.split(rows.tokens)
    # A border is a separate document: transformers begins a chat with the template's first token.
    documents = np.where(rows.documents == PADDING, PADDING, 2 * rows.documents + ~is_border)
    batch = build_batch(WindowBatch(tokens, documents), separate_documents=True)
    is_ignored = torch.from_numpy(np.ascontiguousarray(~has_loss[:, 1:]))
    return replace(batch, targets_BT=batch.targets_BT.masked_fill(is_ignored, IGNORED))


# B rows, T positions

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, the increment of splitmix64


def compute_batch_digest(batches: Sequence[Batch]) -> int:
    """Compute the digest of the rows of some micro-batches.

    Args:
        batches: Micro-batches of one step on this rank.

    Returns:
        The sum over rows as a signed 64-bit integer, which fits a tensor. Rows without a target
        count 0.
    """
    total = 0
    with np.errstate(over="ignore"):
        for batch in batches:
            learns_B = (
                (batch.targets_BT >= 0).view(len(batch.targets_BT), -1).any(1).numpy(force=True)
            )
            # Hashed again per role: swapped tokens and targets must not give the same sum.
            rows_B = _hash_rows(batch.tokens_BT) + hash_splitmix64(_hash_rows(batch.targets_BT))
            if batch.source_BS is not None:
                rows_B = rows_B + hash_splitmix64(hash_splitmix64(_hash_rows(batch.source_BS)))
            total += int(rows_B[learns_B].sum(dtype=np.uint64))
    # The same bits as a signed number, which torch can sum over ranks.
    return int(np.uint64(total & 0xFFFFFFFFFFFFFFFF).astype(np.int64))


def format_digest(digest: int) -> str:
    """Format a digest as 16 hexadecimal digits.

    Args:
        digest: From `compute_batch_digest`, summed over ranks modulo 2^64.

    Returns:
        The digits, lower case.
    """
    return f"{digest & 0xFFFFFFFFFFFFFFFF:016x}"


def _hash_rows(ids_BT: torch.Tensor) -> NDArray[np.uint64]:
    """Return a hash of each row: the sum of its ids, each mixed with its position."""
    ids = ids_BT.view(len(ids_BT), -1).numpy(force=True).astype(np.int64).view(np.uint64)
    positions = hash_splitmix64((np.arange(ids.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    rows: NDArray[np.uint64] = hash_splitmix64(hash_splitmix64(ids + _GOLDEN) ^ positions).sum(
        axis=1, dtype=np.uint64
    )
    return rows
