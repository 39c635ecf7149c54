"""Train a WordPiece vocabulary with the library `tokenizers`, in BERT's format (Devlin 2018;
Schuster 2012).

Writes tokenizer.json, tokenizer_config.json and made.json.

Invariants:
- Equal texts give equal bytes. The library numbers characters in the order of a hash map and breaks
  ties of pairs by these numbers, so all characters are numbered here, and every distinct word is
  counted once.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from llmsys.config.tokenizer import WORDPIECE_SYMBOLS, WordPieceConfig
from llmsys.data_pipeline.tokenize.tokenizer_files import publish_json_tokenizer
from llmsys.errors import DataError
from llmsys.vocabulary.hugging_face_tokenizer import JSON_NAME
from llmsys.vocabulary.special_tokens import CONFIG_NAME

PREFIX = "##"  # of a piece inside a word


def fit_wordpiece(
    lines: Iterator[str], *, folder: Path, config: WordPieceConfig, sample: dict[str, Any]
) -> dict[str, Any]:
    """Train a tokenizer on lines of text and publish it.

    Args:
        lines: the text.
        folder: the tokenizer folder to write.
        config: options of the vocabulary.
        sample: numbers of documents and bytes, for `made.json` and messages.

    Returns:
        `fingerprint`, `vocab_size` and `eos_id`, for later stages.

    Raises:
        DataError: if the vocabulary has no room for the characters, or the text has too few pieces
            for it.
    """
    words = _count_words(lines, config)
    characters, inner = _select_alphabet(words, config.limit_alphabet)
    symbols = [*WORDPIECE_SYMBOLS, *config.special_tokens]
    fixed = len(symbols) + len(characters) + len(inner)
    if fixed > config.vocab_size:
        raise DataError(
            f"tokenizer.vocab_size={config.vocab_size} has no room for {fixed} special tokens and "
            f"characters. Use tokenizer.vocab_size={fixed + 1} or more, or a smaller "
            "tokenizer.limit_alphabet."
        )
    vocabulary = _train_vocabulary(words, symbols, characters, inner, config)
    if len(vocabulary) < config.vocab_size:
        raise DataError(
            f"tokenizer.vocab_size={config.vocab_size} cannot be trained on "
            f"{sample['documents']:,} documents ({sample['bytes']:,} bytes): they give "
            f"{len(vocabulary)} pieces. Use tokenizer.vocab_size={len(vocabulary)}, a smaller "
            "tokenizer.min_frequency, or more documents."
        )
    made = {"config": config.model_dump(mode="json"), "sample": sample}
    with TemporaryDirectory() as made_in:
        file = Path(made_in) / JSON_NAME
        file.write_text(_build_tokenizer(vocabulary, symbols, config).to_str())
        names = dict(zip(("pad", "unk", "cls", "sep", "mask"), WORDPIECE_SYMBOLS, strict=True))
        settings = {f"{role}_token": symbol for role, symbol in names.items()} | {
            "do_lower_case": config.lowercase
        }
        (file.parent / CONFIG_NAME).write_text(json.dumps(settings))
        return publish_json_tokenizer(folder, file, names["sep"], made)


def _build_normalizer(config: WordPieceConfig) -> normalizers.Normalizer:
    # Accents are stripped where letters are lowered, as in BERT.
    return normalizers.BertNormalizer(lowercase=config.lowercase)


def _count_words(lines: Iterable[str], config: WordPieceConfig) -> Counter[str]:
    normalizer, splitter = _build_normalizer(config), pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for line in lines:
        words.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line)))
    return words


def _select_alphabet(words: Counter[str], limit: int) -> tuple[list[str], list[str]]:
    """Return the most frequent characters, and those of them that continue a word.

    The library leaves out a character inside of words unless it is a piece by itself too.
    """
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for character in word:
            counts[character] += count
    kept = set(sorted(counts, key=lambda character: (-counts[character], character))[:limit])
    return sorted(kept), sorted({character for word in words for character in word[1:]} & kept)


def _train_vocabulary(
    words: Counter[str],
    symbols: list[str],
    characters: list[str],
    inner: list[str],
    config: WordPieceConfig,
) -> dict[str, int]:
    """Return pieces and their ids: symbols, characters, then merges in the order in which they
    are learnt.
    """
    numbered = [*symbols, *characters, *(PREFIX + character for character in inner)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        # Named as special tokens, which come first and in this order.
        special_tokens=numbered,
        limit_alphabet=0,
        continuing_subword_prefix=PREFIX,
        show_progress=False,
    )
    library = Tokenizer(models.WordPiece(unk_token=WORDPIECE_SYMBOLS[1]))
    # Words with a character that is not kept would be learnt without it.
    kept = set(characters)
    sample = (word for word in sorted(words) if kept.issuperset(word))
    library.train_from_iterator(
        (one for word in sample for one in repeat(word, words[word])), trainer
    )
    found: dict[str, int] = library.get_vocab(with_added_tokens=False)
    return found


def _build_tokenizer(
    vocabulary: dict[str, int], symbols: list[str], config: WordPieceConfig
) -> Tokenizer:
    _, unknown, cls, sep, _ = WORDPIECE_SYMBOLS
    library = Tokenizer(
        models.WordPiece(vocabulary, unk_token=unknown, continuing_subword_prefix=PREFIX)
    )
    library.normalizer = _build_normalizer(config)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.post_processor = processors.BertProcessing(
        (sep, vocabulary[sep]), (cls, vocabulary[cls])
    )
    library.decoder = decoders.WordPiece(prefix=PREFIX)
    library.add_special_tokens(symbols)
    return library
