"""Which position may see which, built once per forward pass and shared by all layers.

`None` stands for plain causal attention, the cheapest case. Every other mask is boolean: true where a query may look.
"""

import torch
from torch import Tensor

# B rows, T query positions, S key positions


def document_mask(documents_BT: Tensor) -> Tensor:
    """Causal within a document: position t sees s <= t of equal document number. Shape (B, 1, T, T)."""
    length = documents_BT.shape[1]
    causal_TS = torch.ones(length, length, dtype=torch.bool, device=documents_BT.device).tril_()
    same_BTS = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same_BTS & causal_TS)[:, None]


def cached_mask(padding_B: Tensor, start: int, length: int) -> Tensor:
    """Causal over a cache whose rows begin with `padding_B` empty slots. Shape (B, 1, T, start + T).

    A padded query sees itself alone: a row without any key would be 0/0, and its NaN would spread through the values.
    """
    query_T = torch.arange(start, start + length, device=padding_B.device)[:, None]
    key_S = torch.arange(start + length, device=padding_B.device)
    real_BTS = (key_S <= query_T) & (key_S >= padding_B[:, None, None])
    return (real_BTS | (key_S == query_T))[:, None]
