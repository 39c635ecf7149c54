"""Sample the next token from logits: greedy, temperature, top-k, top-p, min-p, repetition penalty.

Runs in float32 on the CPU with a generator per row, so a row's samples depend on its own logits,
tokens and seed alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmsys.errors import ConfigError

# B rows, V vocabulary


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling. The defaults sample from the model's own distribution.

    Attributes:
        temperature: divisor of the logits; 0 is greedy.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: probability of the smallest set of tokens to keep; 1 keeps all.
        min_p: minimum probability relative to the most likely token; 0 keeps all.
        repetition_penalty: penalty on tokens of the prompt and the text; 1 changes nothing.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check the range of each parameter."""
        rules = (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or positive"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "positive; 1 is no penalty",
            ),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ConfigError(
                    f"generation.{name}={getattr(self, name)} is out of range: it must be {rule}. "
                    f"Set it to a value in range."
                )


def sample_tokens(
    logits_BV: Tensor,
    generators: Sequence[torch.Generator],
    params: SamplingParams,
    seen: Sequence[Sequence[int]] | None = None,
) -> Tensor:
    """Return one token id per row, (B,). Temperature 0 takes the most likely token without
    sampling.

    Filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        logits_BV: any float dtype and device.
        generators: one CPU generator per row.
        params: the filters.
        seen: tokens of each row's prompt and text, for the repetition penalty.
    """
    logits_BV = logits_BV.detach().to(device="cpu", dtype=torch.float32)
    if params.repetition_penalty != 1 and seen is not None:
        logits_BV = apply_repetition_penalty(logits_BV, seen, params.repetition_penalty)
    if params.temperature == 0:
        return logits_BV.argmax(dim=-1)
    kept_BV = filter_top_p(filter_top_k(logits_BV / params.temperature, params.top_k), params.top_p)
    probability_BV = filter_min_p(kept_BV, params.min_p).softmax(dim=-1)
    # One draw per row: a batched draw would share one generator between prompts.
    draws = [
        torch.multinomial(row, 1, generator=own)
        for row, own in zip(probability_BV, generators, strict=True)
    ]
    return torch.cat(draws)


def apply_repetition_penalty(
    logits_BV: Tensor, seen: Sequence[Sequence[int]], penalty: float
) -> Tensor:
    """Make tokens that were seen less likely (Keskar 2019, CTRL, arXiv:1909.05858, 4.1).

    Args:
        logits_BV: Logits of the next token.
        seen: Token ids of each row so far.
        penalty: Positive logits of seen tokens are divided by it, negative ones multiplied.

    Returns:
        (B, V).
    """
    logits_BV = logits_BV.clone()
    for row, tokens in zip(logits_BV, seen, strict=True):
        index = torch.tensor(sorted(set(tokens)), dtype=torch.int64)
        chosen = row[index]
        row[index] = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    return logits_BV


def filter_top_k(logits_BV: Tensor, top_k: int) -> Tensor:
    """Set all but the largest logits of each row to minus infinity.

    Args:
        logits_BV: Logits of the next token.
        top_k: How many stay; 0 keeps all.

    Returns:
        (B, V).
    """
    if top_k <= 0 or top_k >= logits_BV.shape[-1]:
        return logits_BV
    kept = logits_BV.topk(top_k, dim=-1)
    return torch.full_like(logits_BV, -torch.inf).scatter(-1, kept.indices, kept.values)


def filter_top_p(logits_BV: Tensor, top_p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose total probability reaches a limit (Holtzman
    2019, arXiv:1904.09751).

    Args:
        logits_BV: Logits of the next token.
        top_p: The limit; the likeliest token always stays.

    Returns:
        (B, V), minus infinity for the others.
    """
    if top_p >= 1:
        return logits_BV
    ordered_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    probability_BV = ordered_BV.softmax(dim=-1)
    before_BV = probability_BV.cumsum(dim=-1) - probability_BV
    dropped_BV = before_BV >= top_p
    # Rounding of cumsum − probability may exceed a tiny top_p.
    dropped_BV[:, 0] = False
    return logits_BV.masked_fill(dropped_BV.gather(-1, order_BV.argsort(dim=-1)), -torch.inf)


def filter_min_p(logits_BV: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least `min_p` times as likely as the likeliest (Nguyen 2024,
    arXiv:2407.01082).

    Args:
        logits_BV: Logits of the next token.
        min_p: The factor; 0 keeps all.

    Returns:
        (B, V), minus infinity for the others.
    """
    if min_p <= 0:
        return logits_BV
    least_B1 = logits_BV.amax(dim=-1, keepdim=True) + math.log(min_p)
    return logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
