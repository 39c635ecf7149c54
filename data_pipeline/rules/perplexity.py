"""Keep or drop documents by their perplexity under a user's language model (CCNet, Wenzek et al.
2020).

Texts are scored line by line, each normalized and, if configured, split into pieces. Perplexity is
10^(-log10 p / (words + lines)): the end of each line counts as a word. Two limits divide documents
into CCNet's head, middle and tail.

Reads .arpa or .arpa.gz into dictionaries, about 150 bytes per n-gram (back-off as in Katz 1987).
Use KenLM for large models; the scores agree to float32 precision. An unknown word is <unk>, and
costs 100 if the model has no <unk>.
"""

import gzip
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from llmsys.config.custom_rules import PerplexityConfig
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
)
from llmsys.errors import DataError

_UNKNOWN = "<unk>"
_BEGIN = "<s>"
_END = "</s>"
_NO_UNKNOWN = -100.0


class ArpaModel:
    """Probabilities and back-off weights by n-gram, words joined by one space."""

    def __init__(self, path: Path) -> None:
        """Read a model.

        Raises:
            DataError: if it cannot be read; names the invalid line.
        """
        self._probability: dict[str, float] = {}
        self._backoff: dict[str, float] = {}
        self.order = 0
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8")
                if path.suffix == ".gz"
                else open(path, encoding="utf-8") as file
            ):
                self._read_ngrams(path, enumerate(file, 1))
        except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} cannot be read as an ARPA model: {error}. Give a complete .arpa or "
                ".arpa.gz file."
            ) from None
        if not self.order:
            raise DataError(f"{path} has no n-grams. Give a complete .arpa or .arpa.gz file.")

    def _read_ngrams(self, path: Path, lines: Iterator[tuple[int, str]]) -> None:
        for number, line in lines:
            text = line.strip()
            if text.endswith("-grams:") and text.startswith("\\"):
                self.order = int(text[1:].removesuffix("-grams:"))
            elif self.order and text and not text.startswith("\\"):
                fields = text.split("\t") if "\t" in text else _split_fields(text, self.order)
                try:
                    probability = float(fields[0])
                    words = fields[1]
                    if words.count(" ") + 1 != self.order:
                        raise ValueError
                    self._probability[words] = probability
                    if len(fields) > 2 and float(fields[2]):
                        self._backoff[words] = float(fields[2])
                except (ValueError, IndexError):
                    raise DataError(
                        f"{path}, line {number}: {text[:80]!r} is not a probability and "
                        f"{self.order} words, separated by tabs. Give a complete .arpa or "
                        ".arpa.gz file."
                    ) from None

    def score_line(self, line: str) -> float:
        """Return log10 of the probability of a line, from its beginning to its end."""
        known = self._probability
        words = [word if word in known else _UNKNOWN for word in line.split()]
        context: list[str] = [_BEGIN]
        total = 0.0
        for word in [*words, _END]:
            total += self._score_word(context, word)
            # Order 1 has no context, and `[-0:]` would be all of it.
            context = [*context, word][-(self.order - 1) :] if self.order > 1 else []
        return total

    def _score_word(self, context: list[str], word: str) -> float:
        """Return the log10 probability of the longest known n-gram plus the back-off of each
        longer context.
        """
        penalty = 0.0
        for start in range(len(context) + 1):
            history = " ".join(islice(context, start, None))
            found = self._probability.get(f"{history} {word}" if history else word)
            if found is not None:
                return penalty + found
            penalty += self._backoff.get(history, 0.0) if history else 0.0
        return penalty + _NO_UNKNOWN


def _split_fields(text: str, order: int) -> list[str]:
    """Split a line that has spaces instead of tabs."""
    parts = text.split()
    return [parts[0], " ".join(parts[1 : order + 1]), *parts[order + 1 :]]


# Moses' replacements of punctuation, which CCNet adopted.
_PUNCTUATION = str.maketrans(
    dict(
        zip(
            "，。、„”“«»」「《》´∶：？！（）；–～’━〈〉【】％►",
            ',.,"""""""""\'::?!();-~\'-<>[]%-',
            strict=True,
        )
    )
    | {"—": " - ", "．": ". ", "…": "..."}
)
_DIGIT = re.compile(r"\d")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class PerplexityRule:
    """A rule that drops documents by bucket."""

    kind = "perplexity"

    def __init__(self, config: PerplexityConfig) -> None:
        self._config = config
        self._score = _load_scorer(config)
        self._pieces = (
            _load_piece_splitter(config.sentencepiece_model) if config.sentencepiece_model else None
        )
        self.limits = list_perplexity_thresholds(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts by bucket; the statistics are the perplexity, and the bucket as 0,
        1 or 2.
        """
        values = np.fromiter(map(self.compute_perplexity, batch.texts), np.float64, len(batch))
        head, tail = self._config.head_max_perplexity, self._config.tail_min_perplexity
        bucket = np.searchsorted([head, np.nextafter(tail, np.inf)], values, side="right").astype(
            np.float64
        )
        return apply_thresholds(self.limits, {"perplexity": values, "bucket": bucket}, len(batch))

    def compute_perplexity(self, text: str) -> float:
        """Return the perplexity of a text."""
        score = 0.0
        length = 0
        for line in text.split("\n"):
            words = self._prepare_line(line)
            score += self._score(words)
            # The words, and one for the end of the line.
            length += words.count(" ") + 1 + bool(words)
        return float(10.0 ** min(-score / length, 300.0))  # 10^308 is the largest float

    def _prepare_line(self, line: str) -> str:
        """Return the words of a line joined by spaces."""
        text = normalize_line(line) if self._config.normalize == "ccnet" else line
        return " ".join(self._pieces(text) if self._pieces else text.split())


def normalize_line(line: str) -> str:
    """Return CCNet's normal form: lower case, no accents, each digit 0, plain punctuation, no
    control characters.
    """
    text = line.strip().lower()
    if not text.isascii():
        marks = unicodedata.normalize("NFD", text)
        text = "".join(character for character in marks if unicodedata.category(character) != "Mn")
    return _CONTROL.sub("", _DIGIT.sub("0", text).translate(_PUNCTUATION))


def list_perplexity_thresholds(config: PerplexityConfig) -> list[ThresholdTest]:
    """Return the limits of the kept buckets; a value equal to a limit is kept."""
    limits = []
    if "head" not in config.keep:
        lowest = (
            config.head_max_perplexity if "middle" in config.keep else config.tail_min_perplexity
        )
        limits.append(ThresholdTest("perplexity", "perplexity", "below", lowest))
    if "tail" not in config.keep:
        highest = (
            config.tail_min_perplexity if "middle" in config.keep else config.head_max_perplexity
        )
        limits.append(ThresholdTest("perplexity", "perplexity", "above", highest))
    return limits


def _load_scorer(config: PerplexityConfig) -> Callable[[str], float]:
    if config.backend == "arpa":
        return ArpaModel(config.model).score_line
    import kenlm  # an extra; its absence is reported before, with the install command

    try:
        model = kenlm.Model(str(config.model))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{config.model} is not a valid language model: {error}. Give a complete file."
        ) from None
    return lambda line: float(model.score(line))


def _load_piece_splitter(path: Path) -> Callable[[str], list[str]]:
    import sentencepiece

    try:
        model: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path} is not a valid SentencePiece model: {error}. Give a complete .model file."
        ) from None
    return lambda text: model.encode(text, out_type=str)
