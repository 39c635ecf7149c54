"""Translate with an encoder-decoder: beam search over batches of sources of similar length, and
BLEU by sacrebleu.

Invariants:
- A translation depends on the model, its source and the settings, never on the other sources of the
  batch: padding is a document that no target attends to.
- BLEU is computed on cased, detokenized text; its signature names the settings.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmsys.config.run import RunConfig
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import ConfigError, DataError
from llmsys.generate.beam_search import search_beams
from llmsys.generate.text_generation import BeamSearchParams, use_eval_mode
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from llmsys.train.build_transform import get_start_token
from llmsys.vocabulary.tokenizer import Tokenizer

# B rows, S source positions, T target positions, R rows of the cache

EXTRA_TOKENS = 50  # a translation may be this much longer than its source (Vaswani 2017, 6.1)
PADDING = -1


def translate_sequences(
    model: Transformer,
    sources: Sequence[Sequence[int]],
    *,
    decoding: BeamSearchParams,
    start_token: int,
    end_token: int,
    vocab_size: int | None = None,
    batch_tokens: int = 2048,
) -> list[list[int]]:
    """Return the best translation found for each source, without its end token, in the order of the
    sources.

    Args:
        model: an encoder-decoder.
        sources: token ids of each source, with their end token.
        decoding: parameters of beam search.
        start_token: first id of every target.
        end_token: id that ends a target.
        vocab_size: ids of the tokenizer; larger ids are never chosen. None allows all rows of the
            vocabulary.
        batch_tokens: maximum source tokens of a batch, with padding.

    Longer targets than `model.max_position_embeddings` are cut there.
    """
    found: list[list[int]] = [[] for _ in sources]
    with use_eval_mode(model):
        for indices in _iter_batches(sources, batch_tokens):
            rows = _translate_batch(
                model,
                [sources[index] for index in indices],
                decoding,
                start_token,
                end_token,
                vocab_size,
            )
            for index, row in zip(indices, rows, strict=True):
                found[index] = row
    return found


def _translate_batch(
    model: Transformer,
    sources: list[Sequence[int]],
    decoding: BeamSearchParams,
    start_token: int,
    end_token: int,
    vocab_size: int | None,
) -> list[list[int]]:
    device = model.embed.weight.device
    # the start token takes one position
    max_target_tokens = model.config.max_position_embeddings - 1
    limits = [max(1, min(len(source) + EXTRA_TOKENS, max_target_tokens)) for source in sources]
    source_BS, documents_BS = (x.to(device) for x in pad_sources(sources))
    memory = model.encode_source(source_BS, documents_BS)
    cache = KeyValueCache(model.config, len(sources), 1 + max(limits))
    start_B1 = torch.full((len(sources), 1), start_token, device=device)
    first_BV = model(start_B1, memory=memory, cache=cache)[:, -1, :vocab_size]

    def compute_step_logits(rows_R: Tensor, tokens_R: Tensor) -> Tensor:
        cache.select_rows(rows_R)
        logits_RTV: Tensor = model(tokens_R[:, None].to(device), cache=cache)
        return logits_RTV[:, -1, :vocab_size]

    return search_beams(
        first_BV,
        compute_step_logits,
        num_beams=decoding.num_beams,
        length_penalty=decoding.length_penalty,
        limits=limits,
        end_token=end_token,
    )


def pad_sources(sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Pad sources to one length.

    Args:
        sources: Token ids of each.

    Returns:
        Tokens (B, S) and document ids (B, S): 0, and -1 for padding.
    """
    longest = max(map(len, sources))
    tokens_BS = torch.zeros(len(sources), longest, dtype=torch.int64)
    documents_BS = torch.full((len(sources), longest), PADDING)
    for row, source in enumerate(sources):
        tokens_BS[row, : len(source)] = torch.tensor(source, dtype=torch.int64)
        documents_BS[row, : len(source)] = 0
    return tokens_BS, documents_BS


def _iter_batches(sources: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of sources of similar length, as many as fit."""
    batch: list[int] = []
    for index in sorted(range(len(sources)), key=lambda index: (len(sources[index]), index)):
        # Sorted by length, so the last source sets the padded length of the batch.
        if batch and (len(batch) + 1) * len(sources[index]) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def translate_lines(
    model: Transformer, tokenizer: Tokenizer, config: RunConfig, lines: Sequence[str]
) -> list[str]:
    """Translate lines by beam search with `generation.num_beams` and `generation.length_penalty`.

    Args:
        model: the model of the config.
        tokenizer: its tokenizer.
        config: the config of the run.
        lines: source texts.

    Returns:
        A translation of each line; an empty one for an empty line.

    Raises:
        ConfigError: the model is no encoder-decoder.
        DataError: a line has more tokens than the model has positions.
    """
    if config.model.family != "encoder_decoder":
        raise ConfigError(
            f"A model with family={config.model.family} does not translate. Use llmsys generate."
        )
    sources = [[*tokenizer.encode(line), tokenizer.eos_id] for line in lines]
    limit = config.model.max_position_embeddings
    for number, source in enumerate(sources, start=1):
        if len(source) > limit:
            raise DataError(
                f"line {number} has {len(source)} tokens, more than "
                f"model.max_position_embeddings={limit}. Shorten it."
            )
    # An empty line has only its end token.
    asked = [index for index, source in enumerate(sources) if len(source) > 1]
    found = translate_sequences(
        model,
        [sources[index] for index in asked],
        decoding=BeamSearchParams(config.generation.num_beams, config.generation.length_penalty),
        start_token=get_start_token(config),
        end_token=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
    )
    texts = [""] * len(lines)
    for index, tokens in zip(asked, found, strict=True):
        texts[index] = tokenizer.decode(tokens)
    return texts


def read_heldout_texts(config: RunConfig) -> tuple[list[str], list[str]]:
    """Read the held-out pairs of the config's dataset.

    Args:
        config: the config of the run.

    Returns:
        Sources and references as they were given, in their order.
    """
    folder = config.data.folder
    sources: list[str] = []
    references: list[str] = []
    for file in load_manifest(folder).documents.files:
        if file.name.startswith("heldout-"):
            for batch in read_batches(folder / "documents" / file.name):
                sources += batch.column("source").to_pylist()
                references += batch.column("target").to_pylist()
    return sources, references


def compute_bleu(translations: Sequence[str], references: Sequence[str]) -> dict[str, Any]:
    """Compute corpus BLEU with one reference each.

    Args:
        translations: detokenized texts.
        references: one text for each translation.

    Returns:
        bleu (0 to 100), brevity_penalty, length_ratio, sentences and sacrebleu's signature.
    """
    # Imported here: only scores need it.
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU()
    score = metric.corpus_score(list(translations), [list(references)])
    return {
        "bleu": score.score,
        "brevity_penalty": score.bp,
        "length_ratio": score.ratio,
        "sentences": len(references),
        "signature": str(metric.get_signature()),
    }
