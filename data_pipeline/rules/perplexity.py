"""Documents kept or dropped by their perplexity under a language model of the user's (CCNet, Wenzek et al. 2020).

Reads texts line by line, each normalised and, when asked, split into pieces; perplexity is 10^(-log10 p / (words +
lines)), so that the end of each line counts as a word. Buckets are CCNet's head, middle and tail by two limits.
"""

import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.rules.arpa import ArpaModel
from data_pipeline.rules.batch import DocumentBatch
from data_pipeline.rules.verdict import ThresholdTest, RuleVerdicts, apply_thresholds
from llmsys.config.custom_rules import PerplexityConfig
from llmsys.errors import DataError

# Moses' replacements of punctuation, which CCNet took over.
_PUNCTUATION = str.maketrans(
    dict(zip("，。、„”“«»」「《》´∶：？！（）；–～’━〈〉【】％►", ',.,"""""""""\'::?!();-~\'-<>[]%-', strict=True))
    | {"—": " - ", "．": ". ", "…": "..."}
)
_DIGIT = re.compile(r"\d")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


class PerplexityRule:
    """Drops documents by bucket."""

    kind = "perplexity"

    def __init__(self, config: PerplexityConfig) -> None:
        self._config = config
        self._score = _load_scorer(config)
        self._pieces = _load_piece_splitter(config.pieces) if config.pieces else None
        self.limits = list_perplexity_thresholds(config)

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Verdicts by the bucket; statistics: the perplexity, and the bucket as 0, 1 or 2."""
        values = np.fromiter(map(self.compute_perplexity, batch.texts), np.float64, len(batch))
        head, tail = self._config.head_below, self._config.tail_above
        bucket = np.searchsorted([head, np.nextafter(tail, np.inf)], values, side="right").astype(np.float64)
        return apply_thresholds(self.limits, {"perplexity": values, "bucket": bucket}, len(batch))

    def compute_perplexity(self, text: str) -> float:
        """The perplexity of a text."""
        score, length = 0.0, 0
        for line in text.split("\n"):
            words = self._prepare_line(line)
            score += self._score(words)
            length += words.count(" ") + 1 + bool(words)
        return float(10.0 ** min(-score / length, 300.0))

    def _prepare_line(self, line: str) -> str:
        """The words of a line, parted by one space."""
        text = normalize_line(line) if self._config.normalize == "ccnet" else line
        return " ".join(self._pieces(text) if self._pieces else text.split())


def normalize_line(line: str) -> str:
    """CCNet's normal form: lower case, no accents, each digit 0, plain punctuation, no control characters."""
    text = line.strip().lower()
    if not text.isascii():
        marks = unicodedata.normalize("NFD", text)
        text = "".join(character for character in marks if unicodedata.category(character) != "Mn")
    return _CONTROL.sub("", _DIGIT.sub("0", text).translate(_PUNCTUATION))


def list_perplexity_thresholds(config: PerplexityConfig) -> list[ThresholdTest]:
    """What lies outside the buckets that stay; a value equal to a limit stays."""
    limits = []
    if "head" not in config.keep:
        lowest = config.head_below if "middle" in config.keep else config.tail_above
        limits.append(ThresholdTest("perplexity", "perplexity", "below", lowest))
    if "tail" not in config.keep:
        highest = config.tail_above if "middle" in config.keep else config.head_below
        limits.append(ThresholdTest("perplexity", "perplexity", "above", highest))
    return limits


def _load_scorer(config: PerplexityConfig) -> Callable[[str], float]:
    if config.reader == "arpa":
        return ArpaModel(config.model).score_line
    import kenlm  # an extra; side_files says so when it is missing

    try:
        model = kenlm.Model(str(config.model))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{config.model} cannot be used as a language model: {error}. Name a whole model.") from None
    return lambda line: float(model.score(line))


def _load_piece_splitter(path: Path) -> Callable[[str], list[str]]:
    import sentencepiece

    try:
        model: Any = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise DataError(f"{path} cannot be used as a SentencePiece model: {error}. Name a whole .model file.") from None
    return lambda text: model.encode(text, out_type=str)
