"""A tiny mixture-of-experts model and fixed batches for it, for tests about training."""

import torch

from llmsys.config.model import ModelConfig
from llmsys.data.batch import Batch

SEQUENCES, LENGTH = 8, 16


def build_tiny_config(**changes: object) -> ModelConfig:
    """Two layers, four experts, grouped-query attention; about 20 thousand parameters."""
    settings: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
        "moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_shared_experts": 1,
            "score": "sigmoid",
        },
    }
    return ModelConfig.model_validate(settings | changes)


def build_sequences(step: int, first: int, count: int, ignored: int = 0) -> Batch:
    """Sequences `first` to `first + count - 1` of a step, the same whoever asks. `ignored`
    targets do not count.
    """
    rows = []
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(1000 * step + index)
        rows.append(torch.randint(0, 64, (LENGTH + 1,), generator=generator))
    tokens_BT = torch.stack(rows)
    targets_BT = tokens_BT[:, 1:].clone()
    if ignored:
        targets_BT[0, :ignored] = -100
    return Batch(tokens_BT[:, :-1].contiguous(), targets_BT, None)
