"""Configuration of rules that read the user's files: word lists, classifiers, n-gram language
models and own code.

`llmsys.config.quality_rules` adds these sections to its union `RuleConfig`.

llmsys ships no lists of words, hosts or URLs.
"""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.encoder_model import EncoderModelConfig
from llmsys.config.python_code import PythonCode
from llmsys.config.section import (
    LocalPath,
    NamedRuleConfig,
    Section,
    raise_violation,
    raise_violations,
)
from llmsys.errors import Violation


class EntryListConfig(Section):
    """Entries of files and of the config. A file has one entry per line; `#` begins a comment."""

    files: tuple[LocalPath, ...] = Field(
        (),
        description="UTF-8 files with one entry per line; .gz is decompressed. Relative paths "
        "start in the working directory.",
    )
    entries: tuple[str, ...] = Field((), description="Entries given inline.")

    @property
    def is_empty(self) -> bool:
        """True when neither files nor entries are given."""
        return not self.files and not self.entries


ANY_LANGUAGE = "any"

Fraction = Annotated[float, Field(ge=0, le=1)]


class WordListConfig(EntryListConfig):
    """Words to avoid in documents of one language."""

    language: str = Field(
        ANY_LANGUAGE,
        min_length=2,
        description="ISO 639-1 code of the documents that the list applies to. any: all documents.",
    )


class BadWordsConfig(NamedRuleConfig):
    """Drop pages, or their lines, that contain listed words (C4; Raffel et al. 2020).

    Matching ignores case and needs a word boundary: no adjacent letter, digit or underscore. Lists
    for `ja`, `th` and `zh` match anywhere, because these languages have no spaces.
    """

    kind: Literal["bad_words"] = "bad_words"
    word_lists: tuple[WordListConfig, ...] = Field(
        min_length=1, description="Word lists; each applies to documents in its language."
    )
    action: Literal["drop_page", "drop_line"] = Field(
        "drop_page", description="Drop the page (C4), or remove only the lines with a listed word."
    )
    max_share: Fraction = Field(
        0.0, description="drop_page: maximum of listed words / whitespace-separated words. C4: 0."
    )
    keep_fraction: Fraction = Field(
        0.0,
        description="drop_page: share of the pages above max_share to keep, selected by the hash "
        "of their text.",
    )
    seed: int = Field(0, ge=0, description="Seed of that selection.")

    @model_validator(mode="after")
    def _check_word_lists(self) -> Self:
        if all(word_list.is_empty for word_list in self.word_lists):
            raise_violation(
                "word_lists",
                "the list is empty. Name a file, such as word_lists: [{files: [words.txt]}].",
            )
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of all word lists."""
        return tuple(path for word_list in self.word_lists for path in word_list.files)


class _ClassifierConfig(NamedRuleConfig):
    """Fields of all classifiers."""

    model: LocalPath = Field(
        description="Model file; relative paths start in the working directory."
    )
    label: str = Field(min_length=1, description="Label to score, as named in the model.")
    min_score: Fraction = Field(0.0, description="Minimum score; documents below are dropped.")
    max_score: Fraction = Field(1.0, description="Maximum score; documents above are dropped.")

    @property
    def files(self) -> tuple[Path, ...]:
        """File of the model."""
        return (self.model,)


class FastTextClassifierConfig(_ClassifierConfig):
    """A supervised fastText model (Joulin et al. 2016), .bin or .ftz; the text is scored as one
    line.
    """

    kind: Literal["fasttext_classifier"] = "fasttext_classifier"


class LinearClassifierConfig(_ClassifierConfig):
    """A linear model over hashed words, word n-grams and character n-grams, as
    `tools/train_classifier.py` trains.
    """

    kind: Literal["linear_classifier"] = "linear_classifier"


class EncoderClassifierConfig(EncoderModelConfig, NamedRuleConfig):
    """A sequence classification model of Hugging Face: a folder with config.json, weights and
    tokenizer, such as `FineWeb-Edu` scores are made with. Without limits it drops nothing: its
    score is a column, as of an annotator.
    """

    kind: Literal["encoder_classifier"] = "encoder_classifier"
    label: str = Field(
        "", description="Label to score, as named in the model. Empty: the only one."
    )
    min_score: float | None = Field(
        None, description="Minimum score; documents below are dropped. null: none is."
    )
    max_score: float | None = Field(
        None, description="Maximum score; documents above are dropped. null: none is."
    )


Bucket = Literal["head", "middle", "tail"]


class PerplexityConfig(NamedRuleConfig):
    """Perplexity under an n-gram language model (CCNet; Wenzek et al. 2020), per line, with
    end-of-line tokens.

    Documents below `head_max_perplexity` are the head, those above `tail_min_perplexity` the tail,
    the rest the middle.
    """

    kind: Literal["perplexity"] = "perplexity"
    model: LocalPath = Field(
        description="Language model: .arpa or .arpa.gz, or a KenLM binary with `backend: kenlm`."
    )
    backend: Literal["kenlm", "arpa"] = Field(
        "kenlm",
        description="kenlm: the KenLM library (optional dependency). arpa: the built-in reader of "
        "ARPA files, slower.",
    )
    sentencepiece_model: LocalPath | None = Field(
        None, description="SentencePiece model that tokenizes lines. null: split at whitespace."
    )
    normalize: Literal["ccnet", "none"] = Field(
        "ccnet",
        description="ccnet: lowercase, strip accents and control characters, replace digits by 0, "
        "use ASCII punctuation.",
    )
    head_max_perplexity: float = Field(
        300.0,
        gt=0,
        description="Maximum perplexity of the bucket head. The default is an example; use the "
        "lower third of your corpus.",
    )
    tail_min_perplexity: float = Field(
        1_000.0,
        gt=0,
        description="Minimum perplexity of the bucket tail. The default is an example; use the "
        "upper third of your corpus.",
    )
    keep: tuple[Bucket, ...] = Field(("head", "middle"), description="Buckets to keep.")

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        violations = []
        if self.head_max_perplexity > self.tail_min_perplexity:
            violations.append(
                Violation(
                    "head_max_perplexity",
                    f"{self.head_max_perplexity:g} is above "
                    f"tail_min_perplexity={self.tail_min_perplexity:g}, which leaves no middle "
                    "bucket. Lower head_max_perplexity or raise tail_min_perplexity.",
                )
            )
        if set(self.keep) in (set(), {"head", "tail"}):
            kept = " and ".join(self.keep) or "nothing"
            violations.append(
                Violation(
                    "keep",
                    f"{kept} are not adjacent. Keep adjacent buckets, such as [head, middle].",
                )
            )
        raise_violations(violations)
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the models."""
        return (self.model, *([self.sentencepiece_model] if self.sentencepiece_model else []))


class _PythonRuleConfig(PythonCode, NamedRuleConfig):
    """Fields of all rules of your own."""

    __hash__ = PythonCode.__hash__

    @property
    def title(self) -> str:
        """The name, or that of the class in lower case with underscores."""
        return self.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", self.class_name).lower()


class PythonRuleConfig(_PythonRuleConfig):
    """A rule of your own: a class that extends
    `llmsys.data_pipeline.rules.python_rule.PythonRule`, or `python_document.DocumentRule`, which
    sees every column.
    """

    kind: Literal["python"] = "python"

    __hash__ = PythonCode.__hash__


class AnnotatorConfig(_PythonRuleConfig):
    """An annotator of your own, which adds columns to documents and drops none: a class that
    extends `llmsys.data_pipeline.rules.python_document.PythonAnnotator`.
    """

    kind: Literal["annotator"] = "annotator"

    __hash__ = PythonCode.__hash__


class MapperConfig(_PythonRuleConfig):
    """A mapper of your own, which changes texts and drops none: a class that extends
    `llmsys.data_pipeline.rules.python_document.PythonMapper`.
    """

    kind: Literal["mapper"] = "mapper"

    __hash__ = PythonCode.__hash__
