"""Continue prompts with a model: all prompts in one batch, padded on the left, with a key-value cache.

Reads a Transformer and a tokenizer, gives one continuation per prompt. A continuation depends on the model, the prompt,
the seed and the settings, never on the prompts beside it: padding is seen by nobody, positions count from the first
real token, and every prompt has its own context limit and draws from its own generator.
"""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from llmsys.errors import ConfigError, DataError
from llmsys.generate.choose import choose
from llmsys.log import logger
from llmsys.model.cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.tokenizer import Tokenizer

# B rows, T positions, V vocabulary

log = logger(__name__)


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_at_eos: bool = True,
) -> list[str]:
    """The continuation of each prompt, without the prompt.

    A text ends at its end-of-document token, after `max_new_tokens`, or at the model's context limit (with a warning).
    Equal prompts get different samples: each draws from a generator seeded by (seed, prompt, occurrence).

    Raises:
        DataError: a prompt that fills the context and leaves no room to continue.
        ConfigError: temperature, top_k or top_p out of range.
    """
    _check_settings(max_new_tokens, temperature, top_k, top_p)
    if not prompts:
        return []
    # In training every document is opened by the token that closed the one before it.
    ids = [[tokenizer.eos_id, *tokenizer.encode(prompt)] for prompt in prompts]
    limits = [_limit(prompt, len(row) - 1, max_new_tokens, model) for prompt, row in zip(prompts, ids, strict=True)]
    generators = _generators(prompts, seed)

    def pick(logits_BV: Tensor, rows: list[int]) -> Tensor:
        own = [generators[row] for row in rows]
        return choose(logits_BV, own, temperature=temperature, top_k=top_k, top_p=top_p)

    stop = tokenizer.eos_id if stop_at_eos else None
    was_training = model.training
    model.eval()
    try:
        new_ids = _continue(model, ids, limits, stop, pick)
    finally:
        model.train(was_training)
    return [_continuation(tokenizer, old, new) for old, new in zip(ids, new_ids, strict=True)]


@torch.no_grad()
def _continue(
    model: Transformer,
    ids: list[list[int]],
    limits: list[int],
    stop: int | None,
    pick: Callable[[Tensor, list[int]], Tensor],
) -> list[list[int]]:
    """The new token ids of every row; rows leave the batch when they end."""
    device = model.embed.weight.device
    longest = max(map(len, ids))
    padding_B = torch.tensor([longest - len(row) for row in ids])
    tokens_BT = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    cache = KeyValueCache(model.config, len(ids), longest + max(limits), padding_B=padding_B)
    new: list[list[int]] = [[] for _ in ids]
    alive = list(range(len(ids)))
    while True:
        logits_BV = model(tokens_BT.to(device), cache=cache)[:, -1]
        tokens_B = pick(logits_BV, alive)
        staying = []
        for place, (row, token) in enumerate(zip(alive, tokens_B.tolist(), strict=True)):
            if token != stop:
                new[row].append(token)
                if len(new[row]) < limits[row]:
                    staying.append(place)
        if not staying:
            return new
        if len(staying) < len(alive):
            cache.keep(staying)
        alive = [alive[place] for place in staying]
        tokens_BT = tokens_B[staying, None]


def _generators(prompts: Sequence[str], seed: int) -> list[torch.Generator]:
    """One generator per prompt; the second of two equal prompts gets another one than the first."""
    generators = []
    for place, prompt in enumerate(prompts):
        occurrence = list(prompts[:place]).count(prompt)
        digest = blake2b(f"{seed}:{occurrence}:{prompt}".encode(errors="surrogatepass"), digest_size=8).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
    return generators


def _continuation(tokenizer: Tokenizer, old: list[int], new: list[int]) -> str:
    """The text that `new` adds; decoded together with the prompt, because a leading space is lost otherwise."""
    before, whole = tokenizer.decode(old), tokenizer.decode(old + new)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def _limit(prompt: str, length: int, max_new_tokens: int, model: Transformer) -> int:
    context = model.config.max_position_embeddings - 1  # one position is the opening token's
    if length >= context:
        raise DataError(
            f"The prompt {_shortened(prompt)} has {length} tokens and leaves no room to continue in a context of "
            f"model.max_position_embeddings={context + 1}, of which one opens the text. "
            f"Shorten it to {context - 1} tokens or less."
        )
    if length + max_new_tokens > context:
        log.warning(
            "the prompt %s continues for %d tokens instead of %d: the context ends at %d",
            *(_shortened(prompt), context - length, max_new_tokens, context),
        )
    return min(max_new_tokens, context - length)


def _shortened(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 40 else prompt[:40] + "…")


def _check_settings(max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> None:
    """Say the rule of the first setting that is out of range."""
    rules = (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, 0 <= temperature < math.inf, "0 (greedy) or a positive number"),
        ("top_k", top_k, top_k >= 0, "0 (all tokens) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise ConfigError(
                f"generation.{name}={value} is out of range: it must be {rule}. Set it to a value in range."
            )
