"""Pairs of sequences as padded batches: source and target of a translation, or text and label.

Reads the two splits that `prepare` writes; row n of one belongs to row n of the other.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmsys.data.batch import IGNORED, Batch
from llmsys.data.packed_windows import PADDING
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import ConfigError, DataError

# B rows, T target positions, S source positions


class TokenRows(Protocol):
    """Sequences of token ids by number, such as `TokenShards`."""

    def get_tokens(self, document: int, /) -> NDArray[Any]:
        """Return the ids of one sequence."""
        ...


class PairRows(Protocol):
    """Sources and targets with equal numbers, such as `SequencePairs`."""

    @property
    def sources(self) -> TokenRows:
        """Input sequences."""
        ...

    @property
    def targets(self) -> TokenRows:
        """Target sequences."""
        ...


class SequencePairs:
    """The pairs of one split: row n of the sources belongs to row n of the targets.

    Args:
        sources: The sources.
        targets: The targets, of the same number.
        positions: Positions of each source in the model, for images. None: the tokens of a
            source.

    Raises:
        DataError: The numbers of sources and targets differ.
    """

    def __init__(
        self, sources: TokenShards, targets: TokenShards, positions: int | None = None
    ) -> None:
        if sources.num_documents != targets.num_documents:
            raise DataError(
                f"{targets.folder} has {targets.num_documents} targets and "
                f"{sources.num_documents} sources in split '{targets.split}'. Run llmsys prepare "
                "CONFIG again."
            )
        self.sources = sources
        self.targets = targets
        self.positions = positions

    @property
    def source_lengths(self) -> NDArray[np.int64]:
        """Positions of each source in the model, (pairs,)."""
        return (
            self.sources.lengths if self.positions is None else np.full(len(self), self.positions)
        )

    def __len__(self) -> int:
        return self.targets.num_documents

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the dataset."""
        return self.targets.fingerprint

    def require_lengths(self, source: int, target: int) -> None:
        """Check that no sequence is longer than the config allows.

        Args:
            source: `batch.sequence_length`, in tokens.
            target: `batch.target_sequence_length`, in tokens.

        Raises:
            ConfigError: One is longer; the message has the longest of its side and its place in the
                data.
        """
        sides = (
            ("sequence_length", "source", self.sources, source),
            ("target_sequence_length", "target", self.targets, target),
        )
        for key, side, shards, limit in sides:
            row = int(shards.lengths.argmax())
            if (length := int(shards.lengths[row])) > limit:
                raise ConfigError(
                    f"batch.{key}={limit} is less than the {length} tokens of the longest {side} "
                    f"of split '{self.targets.split}' (line {shards.get_lineage(row)['offset']} "
                    f"of {shards.get_lineage(row)['file']}). Use {length}, or prepare with a "
                    "smaller data.max_tokens."
                )


# (pairs, row numbers) → a batch of these rows; without rows, one padding row without targets.
MakeBatch = Callable[[PairRows, Sequence[int]], Batch]


def build_pair_batch(
    sources: Sequence[NDArray[Any]], targets: Sequence[NDArray[Any]], start_token: int
) -> Batch:
    """Return a padded batch of sources and targets.

    Padding follows the targets, so that causal attention never sees it; `real_BT` marks it for
    experts.

    Args:
        sources: Token ids of each source.
        targets: Token ids of each target.
        start_token: Input of the decoder at the first position.

    Returns:
        The batch; inputs of the decoder are the targets, shifted by one.
    """
    source_BS, documents_BS = pad_sequences(sources)
    targets_BT, documents_BT = pad_sequences(targets, IGNORED)
    # The inputs are the targets of the position before; padding gets a valid id.
    tokens_BT = targets_BT.roll(1, dims=1).clamp_(min=0)
    tokens_BT[:, 0] = start_token
    real_BT = documents_BT >= 0
    is_full = bool((documents_BS == 0).all())
    return Batch(
        tokens_BT,
        targets_BT,
        source_BS=source_BS,
        source_documents_BS=None if is_full else documents_BS,
        real_BT=None if bool(real_BT.all()) else real_BT,
    )


class TranslationCollator:
    """Builder of translation batches: targets that begin with `start_token`, and their sources."""

    def __init__(self, start_token: int) -> None:
        """Choose the token that begins the inputs of the decoder.

        Args:
            start_token: Its id. Targets are the tokens of the target without it.
        """
        self.start_token = start_token

    def __call__(self, pairs: PairRows, rows: Sequence[int]) -> Batch:
        """Return a batch of rows, see `MakeBatch`."""
        sources = [pairs.sources.get_tokens(row) for row in rows]
        return build_pair_batch(
            sources, [pairs.targets.get_tokens(row) for row in rows], self.start_token
        )


class ClassificationCollator:
    """Builder of classification batches: texts that begin with `opening_token`, as in
    pretraining, and their labels.
    """

    def __init__(self, opening_token: int) -> None:
        """Choose the token that begins each text.

        Args:
            opening_token: Its id, the one that opens documents in pretraining. It takes the place
                of the text's end token, so lengths stay.
        """
        self.opening_token = opening_token

    def __call__(self, pairs: PairRows, rows: Sequence[int]) -> Batch:
        """Return a batch of rows, see `MakeBatch`. The opening token takes the position of the
        text's end token.
        """
        texts = [
            np.concatenate([[self.opening_token], pairs.sources.get_tokens(row)[:-1]])
            for row in rows
        ]
        tokens_BT, documents_BT = pad_sequences(texts)
        labels = [[int(pairs.targets.get_tokens(row)[0])] for row in rows] or [[IGNORED]]
        is_full = bool((documents_BT == 0).all())
        return Batch(tokens_BT, torch.tensor(labels), None if is_full else documents_BT)


def pad_sequences(sequences: Sequence[NDArray[Any]], filler: int = 0) -> tuple[Tensor, Tensor]:
    """Pad sequences to one length.

    Args:
        sequences: Token ids of each. Without any, one row of one padded position is returned,
            for a rank without rows that must join its peers: as a token it would count in the
            experts' balance losses.
        filler: Id of padding.

    Returns:
        Ids (B, T) and document ids (B, T): 0, and PADDING after the end of each.
    """
    if not sequences:
        return torch.full((1, 1), filler, dtype=torch.int64), torch.full(
            (1, 1), PADDING, dtype=torch.int64
        )
    lengths = np.array([len(sequence) for sequence in sequences])
    inside_BT = np.arange(lengths.max()) < lengths[:, None]
    tokens_BT = np.full(inside_BT.shape, filler, np.int64)
    tokens_BT[inside_BT] = np.concatenate(sequences)
    return torch.from_numpy(tokens_BT), torch.from_numpy(np.where(inside_BT, 0, PADDING))


def open_pairs(folder: Path, split: str, positions: int | None = None) -> SequencePairs:
    """Open the pairs of a dataset folder.

    Args:
        folder: A folder that `llmsys prepare` wrote.
        split: "train" or "heldout".
        positions: Positions of an image, whose tokens are the values of its pixels. None: one for
            each token.

    Returns:
        The memory-mapped pairs.

    Raises:
        DataError: The folder holds documents, not pairs.
    """
    targets = open_tokens(folder, split)
    if f"{split}_source" not in targets.manifest.splits:
        raise DataError(
            f"{folder} holds documents, not pairs. Prepare a dataset with data.kind=pairs or "
            "labelled."
        )
    return SequencePairs(open_tokens(folder, f"{split}_source"), targets, positions)
