"""Continue prompts with a model: all prompts in one batch, padded on the left, with a key-value
cache.

Invariants:
- A continuation depends on the model, the prompt, the seed and the settings, never on the other
  prompts of the batch. Padding is masked, positions count from the first real token, and each
  prompt has its own limit and generator.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import assert_never

import torch
from torch import Tensor

from llmsys.errors import ConfigError, DataError
from llmsys.generate.beam_search import search_beams
from llmsys.generate.token_sampling import SamplingParams, sample_tokens
from llmsys.log import get_logger
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.vocabulary.tokenizer import Tokenizer

# B rows, T positions, V vocabulary

log = get_logger(__name__)

# Receives (prompt index, token) for every new token, as soon as it is chosen.
OnToken = Callable[[int, int], None]
# Receives (prompt index, logits (V,), token) before it.
OnLogits = Callable[[int, Tensor, int], None]
Pick = Callable[[Tensor, list[int]], Tensor]
# tokens (B, T) → logits of the next token (B, V), V the ids of the tokenizer.
NextLogits = Callable[[Tensor, KeyValueCache], Tensor]


@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of beam search; see beam_search.py."""

    num_beams: int
    length_penalty: float = 0.6


DEFAULT_SAMPLING = SamplingParams()
NO_TOKEN = -1  # no token has this id


def generate_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    decoding: SamplingParams | BeamSearchParams = DEFAULT_SAMPLING,
    seed: int = 0,
    stop_at_eos: bool = True,
    prefix_ids: Sequence[int] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    stop_ids: Sequence[int] = (),
    on_token: OnToken | None = None,
    on_logits: OnLogits | None = None,
) -> list[str]:
    """Return the continuation of each prompt, without the prompt.

    A text ends at its end-of-document token, after `max_new_tokens`, or at the model's context
    limit (with a warning). Rows of the vocabulary beyond the tokenizer's ids, which pad its size to
    a round number, are never chosen.

    Args:
        model: a decoder.
        tokenizer: its tokenizer.
        prompts: texts to continue.
        max_new_tokens: maximum tokens of a continuation, at least 1.
        decoding: sampling or beam search.
        seed: each prompt samples from a generator seeded by (seed, prompt, occurrence).
        stop_at_eos: end a text at its end-of-document token.
        prefix_ids: ids before each prompt. None is the end-of-document id, which precedes every
            document in training. An empty prompt without a prefix gets the begin or else the end
            id: a model needs a token to continue.
        prompt_ids: ids of each prompt, such as a chat's, instead of the prefix and its own.
        stop_ids: further ids that end a text; beam search ends at the first of them alone.
        on_token: receives every new token; beam search does not call it.
        on_logits: receives the model's logits at every new token, before filters; beam search does
            not call it.

    Raises:
        DataError: a prompt fills the context.
        ConfigError: max_new_tokens is out of range.
    """
    _check_max_new_tokens(max_new_tokens)
    if not prompts:
        return []
    ids, num_prefix = _encode_prompts(tokenizer, prompts, prefix_ids, prompt_ids)
    limits = _compute_token_limits(prompts, ids, num_prefix, max_new_tokens, model)
    stops = (*stop_ids, tokenizer.eos_id) if stop_at_eos else (NO_TOKEN,)
    next_logits = _build_logits_function(model, tokenizer.vocab_size)
    with use_eval_mode(model):
        first_BV, cache = _prefill_prompts(model, ids, limits, next_logits)
        match decoding:
            case BeamSearchParams():
                new_ids = _decode_with_beams(
                    first_BV, cache, limits, stops[0], decoding, next_logits
                )
            case SamplingParams():
                pick = _build_token_picker(decoding, ids, _build_generators(prompts, seed))
                new_ids = _decode_with_sampling(
                    first_BV, cache, limits, stops, pick, (on_token, on_logits), next_logits
                )
            case unreachable:
                assert_never(unreachable)
    return [
        _decode_continuation(tokenizer, old, new) for old, new in zip(ids, new_ids, strict=True)
    ]


def _check_max_new_tokens(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ConfigError(
            f"generation.max_new_tokens={max_new_tokens} is out of range: it must be at least 1. "
            f"Set it to a value in range."
        )


def _encode_prompts(
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    prefix_ids: Sequence[int] | None,
    prompt_ids: Sequence[Sequence[int]] | None,
) -> tuple[list[list[int]], int]:
    """Return the ids of each prompt, and how many of them come before its text."""
    if prompt_ids is not None:
        return [list(row) for row in prompt_ids], 0
    # In training every document follows the end token of the one before it.
    prefix = [tokenizer.eos_id] if prefix_ids is None else list(prefix_ids)
    return [encode_prompt(tokenizer, prompt, prefix) for prompt in prompts], len(prefix)


def encode_prompt(tokenizer: Tokenizer, prompt: str, prefix_ids: Sequence[int]) -> list[int]:
    """Encode a text to continue.

    Args:
        tokenizer: The tokenizer of the model.
        prompt: The text.
        prefix_ids: Ids before it.

    Returns:
        The ids, at least one: an empty text without a prefix is its begin or else its end id.
    """
    return [*prefix_ids, *tokenizer.encode(prompt)] or _get_fallback_prefix(tokenizer)


def _get_fallback_prefix(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.eos_id if tokenizer.bos_id < 0 else tokenizer.bos_id]


@contextlib.contextmanager
def use_eval_mode(model: Transformer) -> Iterator[None]:
    """Set a model to evaluation mode without gradients for the `with` block, and restore its mode.

    Args:
        model: The model.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def _build_token_picker(
    params: SamplingParams, ids: list[list[int]], generators: list[torch.Generator]
) -> Pick:
    """Return a function that samples for some of the rows, each with its own generator and its
    own previous tokens.
    """
    seen = [list(row) for row in ids]

    def pick_tokens(logits_BV: Tensor, rows: list[int]) -> Tensor:
        tokens_B = sample_tokens(
            logits_BV, [generators[row] for row in rows], params, [seen[row] for row in rows]
        )
        for row, token in zip(rows, tokens_B.tolist(), strict=True):
            seen[row].append(token)
        return tokens_B

    return pick_tokens


def _build_logits_function(model: Transformer, vocab_size: int) -> NextLogits:
    def compute_logits(tokens_BT: Tensor, cache: KeyValueCache) -> Tensor:
        if model.run_pipeline is not None:
            return model.run_pipeline(tokens_BT, cache)[:, :vocab_size]
        logits_BTV: Tensor = model(tokens_BT.to(model.embed.weight.device), cache=cache)
        return logits_BTV[:, -1, :vocab_size]

    return compute_logits


def _prefill_prompts(
    model: Transformer, ids: list[list[int]], limits: list[int], next_logits: NextLogits
) -> tuple[Tensor, KeyValueCache]:
    """Return the logits after each prompt, and a cache with the prompts, padded on the left."""
    longest = max(map(len, ids))
    padding_B = torch.tensor([longest - len(row) for row in ids])
    # Padded on the left, so that all prompts end in the same column; the padding id is masked.
    tokens_BT = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    cache = KeyValueCache(model.config, len(ids), longest + max(limits), padding_B=padding_B)
    return next_logits(tokens_BT, cache), cache


def _decode_with_beams(
    first_BV: Tensor,
    cache: KeyValueCache,
    limits: list[int],
    stop: int,
    decoding: BeamSearchParams,
    next_logits: NextLogits,
) -> list[list[int]]:
    def compute_step_logits(rows_R: Tensor, tokens_R: Tensor) -> Tensor:
        cache.select_rows(rows_R.tolist())
        return next_logits(tokens_R[:, None], cache)

    return search_beams(
        first_BV,
        compute_step_logits,
        num_beams=decoding.num_beams,
        length_penalty=decoding.length_penalty,
        limits=limits,
        end_token=stop,
    )


def _decode_with_sampling(
    logits_BV: Tensor,
    cache: KeyValueCache,
    limits: list[int],
    stops: Sequence[int],
    pick: Pick,
    calls: tuple[OnToken | None, OnLogits | None],
    next_logits: NextLogits,
) -> list[list[int]]:
    """Return the new token ids of every row; rows leave the batch when they end."""
    on_token, on_logits = calls
    new: list[list[int]] = [[] for _ in limits]
    alive = list(range(len(limits)))
    while True:
        tokens_B = pick(logits_BV, alive)
        staying = []
        for index, (row, token) in enumerate(zip(alive, tokens_B.tolist(), strict=True)):
            if token not in stops:
                new[row].append(token)
                if on_logits is not None:
                    on_logits(row, logits_BV[index], token)
                if on_token is not None:
                    on_token(row, token)
                if len(new[row]) < limits[row]:
                    staying.append(index)
        if not staying:
            return new
        # Finished rows leave the cache: later steps cost less.
        if len(staying) < len(alive):
            cache.select_rows(staying)
        alive = [alive[index] for index in staying]
        logits_BV = next_logits(tokens_B[staying, None], cache)


def _build_generators(prompts: Sequence[str], seed: int) -> list[torch.Generator]:
    """Return one generator per prompt; equal prompts get different seeds."""
    generators = []
    for index, prompt in enumerate(prompts):
        occurrence = list(prompts[:index]).count(prompt)
        digest = blake2b(
            f"{seed}:{occurrence}:{prompt}".encode(errors="surrogatepass"), digest_size=8
        ).digest()
        # torch takes seeds below 2^63.
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1))
    return generators


def _decode_continuation(tokenizer: Tokenizer, old: list[int], new: list[int]) -> str:
    """Return the text of the new ids. They are decoded with the prompt, because a leading space
    is lost otherwise.
    """
    before = tokenizer.decode(old)
    text = tokenizer.decode(old + new)
    # Without the prefix when an incomplete character at the seam changes its text.
    return text[len(before) :] if text.startswith(before) else tokenizer.decode(new)


def _compute_token_limits(
    prompts: Sequence[str],
    ids: list[list[int]],
    num_prefix: int,
    max_new_tokens: int,
    model: Transformer,
) -> list[int]:
    pairs = zip(prompts, ids, strict=True)
    return [
        _compute_token_limit(prompt, row, num_prefix, max_new_tokens, model)
        for prompt, row in pairs
    ]


def _compute_token_limit(
    prompt: str, row: list[int], num_prefix: int, max_new_tokens: int, model: Transformer
) -> int:
    """Return the maximum new tokens of a row whose first `num_prefix` ids are not the prompt's."""
    context = model.config.max_position_embeddings - num_prefix
    length = len(row) - num_prefix
    if length >= context:
        raise DataError(
            f"The prompt {_format_prompt(prompt)} has {length} tokens and leaves no space for new "
            f"tokens in a context of model.max_position_embeddings={context + num_prefix}, of "
            f"which {num_prefix} open{'s' * (num_prefix == 1)} the text. Shorten it to "
            f"{context - 1} tokens or less."
        )
    if length + max_new_tokens > context:
        log.warning(
            "the prompt %s continues for %d tokens instead of %d: the context ends at %d",
            *(_format_prompt(prompt), context - length, max_new_tokens, context),
        )
    return min(max_new_tokens, context - length)


def _format_prompt(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 40 else prompt[:40] + "…")
