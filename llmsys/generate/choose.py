"""From the logits of one position to the next token: greedy, temperature, top-k, top-p.

Runs in float32 on the CPU with a generator per row, so a row's choices depend on its own logits and seed alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# B rows, V vocabulary


def choose(
    logits_BV: Tensor, generators: Sequence[torch.Generator], *, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """One token id per row, shape (B,). Temperature 0 takes the likeliest token and draws nothing.

    Filters apply in the usual order: temperature, then top-k (0 keeps all), then top-p (1 keeps all).
    """
    logits_BV = logits_BV.detach().to(device="cpu", dtype=torch.float32)
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    probability_BV = keep_top_p(keep_top_k(logits_BV / temperature, top_k), top_p).softmax(dim=-1)
    draws = [torch.multinomial(row, 1, generator=own) for row, own in zip(probability_BV, generators, strict=True)]
    return torch.cat(draws)


def keep_top_k(logits_BV: Tensor, top_k: int) -> Tensor:
    """Set all but the `top_k` largest logits of each row to minus infinity; 0 keeps all."""
    if top_k <= 0 or top_k >= logits_BV.shape[-1]:
        return logits_BV
    kept = logits_BV.topk(top_k, dim=-1)
    return torch.full_like(logits_BV, -torch.inf).scatter(-1, kept.indices, kept.values)


def keep_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose total reaches `top_p` (Holtzman 2019, arXiv:1904.09751).

    The likeliest token always stays.
    """
    if top_p >= 1:
        return logits_BV
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = ordered_BV.softmax(dim=-1)
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    dropped_BV = before_BV >= top_p
    dropped_BV[:, 0] = False
    return logits_BV.masked_fill(dropped_BV.gather(-1, order_BV.argsort(dim=-1)), -torch.inf)
