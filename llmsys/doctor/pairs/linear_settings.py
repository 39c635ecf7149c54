"""Sections of linear attention that the factors of a model set."""

from llmsys.doctor.pairs.factor import Settings

# Four chunks to a row, and decays small enough for a state to live through it.
LINEAR: Settings = {
    "model.linear_attention": {
        "kind": "gated_delta",
        "num_key_heads": 2,
        "num_value_heads": 4,
        "key_head_dim": 8,
        "value_head_dim": 6,
        "chunk_length": 4,
        "max_initial_decay": 0.05,
    }
}
# Initial steps are at most 0.1.
DUAL: Settings = {
    "model.linear_attention": LINEAR["model.linear_attention"]
    | {"kind": "mamba2", "max_initial_decay": 2.0}
}
# The same, and states of more heads than keys.
CHANNELS: Settings = {
    "model.linear_attention": LINEAR["model.linear_attention"]
    | {"kind": "kimi_delta", "max_initial_decay": 2.0, "decay_rank": 3, "gate_rank": 5}
}
