"""What parity is checked on: tiny models that exercise what goes wrong, and the batches they learn from.

Vocabulary and rows that nothing divides, tied embeddings, an expert without tokens, all tokens on one expert, padding,
and a rank on which no target counts.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from llmsys.config.model import ModelConfig
from llmsys.data.batch import IGNORED, PADDING, Batch
from llmsys.data.order import order_key, permutation

SEQUENCES, LENGTH, VOCABULARY = 8, 16, 61

# B sequences, T positions


@dataclass(frozen=True)
class Subject:
    """A model, and by how much the choice of each expert is pushed up or down in every layer."""

    name: str
    model: ModelConfig
    pushed: dict[int, float] = field(default_factory=dict)


def _model(**changes: Any) -> ModelConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "initializer_range": 0.1,
    }
    return ModelConfig.model_validate(settings | changes)


def _experts(per_token: int) -> dict[str, Any]:
    return {
        "num_experts": 4,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": 16,
        "num_shared_experts": 1,
        "score": "sigmoid",
        "balance": {"kind": "bias"},
    }


DENSE = Subject("dense, tied", _model(tie_word_embeddings=True))
EXPERTS = Subject("experts", _model(moe=_experts(2)))
IDLE = Subject("experts, one idle", _model(moe=_experts(2)), {3: -10.0})
CROWDED = Subject("experts, all on one", _model(moe=_experts(1)), {2: 10.0})
SUBJECTS = (DENSE, EXPERTS, IDLE, CROWDED)


def batch_of(step: int, rows: range) -> Batch:
    """Rows of a step, the same whoever asks: the first quarter has no target that counts, one row ends in padding."""
    tokens = torch.tensor([_tokens(step, row) for row in rows])
    tokens_BT, targets_BT = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    documents_BT = torch.zeros_like(tokens_BT)
    for place, row in enumerate(rows):
        if row < SEQUENCES // 4:
            targets_BT[place] = IGNORED
        if row % 4 == 2:
            documents_BT[place, LENGTH // 2 :] = 1
        if row % 4 == 3:
            documents_BT[place, -LENGTH // 4 :] = PADDING
            targets_BT[place, -LENGTH // 4 :] = IGNORED
    return Batch(tokens_BT, targets_BT, documents_BT)


def _tokens(step: int, row: int) -> list[int]:
    order = permutation(VOCABULARY, order_key("doctor", step, row))
    tokens: list[int] = order[: LENGTH + 1].tolist()
    return tokens
