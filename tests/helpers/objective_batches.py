"""Tiny models for each objective, and uneven padded batches as the steps of real pairs give
them.
"""

from collections.abc import Sequence
from typing import Any

import torch

from llmsys.config.objective import SpanCorruptionConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.masking import SpanCorruptor
from llmsys.data.packed_windows import PADDING
from llmsys.data.sequence_pairs import pad_sequences

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32, "norm": {"kind": "layernorm"}, "feed_forward": {"kind": "relu",
        "bias": True},
}  # fmt: skip
MODELS = {
    "translation": SHAPE | {
        "family": "encoder_decoder", "tie_word_embeddings": True,
        "position": {"kind": "sinusoidal"},
        "encoder": {"num_hidden_layers": 2},
    },
    "masked": SHAPE | {"family": "encoder", "head": {"kind": "mlm"},
        "position": {"kind": "learned"}},
    "masked_next_sentence": SHAPE | {
        "family": "encoder", "head": {"kind": "mlm", "pooler": True, "next_sentence": True},
        "position": {"kind": "learned"}, "embedding": {"token_types": 2},
    },
    "permutation": SHAPE | {
        "family": "encoder", "head": {"kind": "permutation"},
        "position": {"kind": "transformer_xl"},
        "tie_word_embeddings": True,
    },
    "classification": SHAPE | {
        "family": "encoder", "head": {"kind": "classification", "num_labels": 3},
        "position": {"kind": "learned"},
    },
}  # fmt: skip


def generate_sentences(count: int, seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [torch.randint(4, 40, (length,), generator=generator).numpy() for length in lengths]


def build_batch(objective: str, step: int, group: int, rows: Sequence[int]) -> Batch:
    """Some rows of a group of sentences, the same whoever asks for them."""
    left, right = (
        generate_sentences(7, 100 * step + group),
        generate_sentences(7, 100 * step + group + 50),
    )
    source_BS, documents_BS = pad_sequences([left[row] for row in rows])
    if objective == "translation":
        targets_BT, _ = pad_sequences([right[row] for row in rows], IGNORED)
        tokens_BT = targets_BT.roll(1, 1).clamp(min=0)
        tokens_BT[:, 0] = 1
        return Batch(tokens_BT, targets_BT, source_BS=source_BS, source_documents_BS=documents_BS)
    if objective == "classification":
        labels = [[int(left[row][0]) % 3] for row in rows] or [[IGNORED]]
        return Batch(source_BS, torch.tensor(labels), documents_BS)
    if objective == "span_corruption":
        corruptor = SpanCorruptor(
            SpanCorruptionConfig(), (2, 3, 39), end_token=1, start_token=0, key=("test",)
        )
        windows = Batch(source_BS, source_BS.masked_fill(documents_BS == PADDING, IGNORED))
        return corruptor.mask_batch(windows, [100 * step + row for row in rows])
    if objective == "permutation":
        places = [
            [t for t in range(len(left[row]) - 1, 0, -1) if left[row][t] % 3 == 0] for row in rows
        ] or [[]]
        predicted_BP = torch.full((len(places), 1 + max(map(len, places))), -1)
        for row, found in enumerate(places):
            predicted_BP[row, : len(found)] = torch.tensor(found, dtype=torch.int64)
        targets_BP = source_BS.gather(1, predicted_BP.clamp(min=0)).masked_fill(
            predicted_BP < 0, IGNORED
        )
        return Batch(source_BS, targets_BP, documents_BS, predicted_BP=predicted_BP)
    pairs: dict[str, Any] = {}
    if objective == "masked_next_sentence":
        follows = [int(left[row][0]) % 2 for row in rows] or [IGNORED]
        pairs = {"token_types_BT": source_BS % 2, "next_sentence_B": torch.tensor(follows)}
    chosen = (source_BS % 3 == 0) & (documents_BS != PADDING) & bool(rows)
    return Batch(
        source_BS.where(~chosen, 3), source_BS.where(chosen, IGNORED), documents_BS, **pairs
    )
