"""Configuration of rules that read the user's files: word lists, classifiers and n-gram language models.

`llmsys.config.quality_rules` adds these sections to its union `RuleConfig`.

llmsys ships no lists of words, hosts or URLs.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.line_rules import NamedRuleConfig
from llmsys.config.section import LocalPath, Section, Violation, raise_violations


class EntryListConfig(Section):
    """Entries of files and of the config. A file has one entry per line; `#` begins a comment."""

    files: tuple[LocalPath, ...] = Field(
        (), description="Files, plain or .gz, UTF-8; paths start in the working folder."
    )
    entries: tuple[str, ...] = Field((), description="Entries written here.")

    @property
    def is_empty(self) -> bool:
        """True when neither files nor entries are given."""
        return not self.files and not self.entries


ANY_LANGUAGE = "any"

Fraction = Annotated[float, Field(ge=0, le=1)]


class WordListConfig(EntryListConfig):
    """Words to avoid in documents of one language."""

    language: str = Field(
        ANY_LANGUAGE, min_length=2, description="ISO 639-1 code of the documents; any: all documents."
    )


class BadWordsConfig(NamedRuleConfig):
    """Drop pages, or their lines, that contain listed words (C4; Raffel et al. 2020).

    Matching ignores case and needs a word boundary: no adjacent letter, digit or underscore. Lists for `ja`, `th` and
    `zh` match anywhere, because these languages have no spaces.
    """

    kind: Literal["bad_words"] = "bad_words"
    word_lists: tuple[WordListConfig, ...] = Field(
        min_length=1, description="Lists, each asked of documents in its language."
    )
    action: Literal["drop_page", "drop_line"] = Field("drop_page", description="What goes; C4 drops the page.")
    max_share: Fraction = Field(
        0.0, description="drop_page: listed words / words split at white space. C4 drops at the first."
    )
    keep_fraction: Fraction = Field(
        0.0, description="drop_page: share of the pages above it, chosen by the hash of their text, that stay."
    )
    seed: int = Field(0, ge=0, description="Another seed keeps other pages.")

    @model_validator(mode="after")
    def _check_word_lists(self) -> Self:
        if all(word_list.is_empty for word_list in self.word_lists):
            raise_violations(
                [Violation("word_lists", "no word is listed. Name a file, such as word_lists: [{files: [words.txt]}].")]
            )
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of all word lists."""
        return tuple(path for word_list in self.word_lists for path in word_list.files)


class _ClassifierConfig(NamedRuleConfig):
    """Fields of all classifiers."""

    model: LocalPath = Field(description="Model file; a relative path starts in the working folder.")
    label: str = Field(min_length=1, description="Label whose score decides, as the model names it.")
    min_score: Fraction = Field(0.0, description="Documents whose score lies below are dropped.")
    max_score: Fraction = Field(1.0, description="Documents whose score lies above are dropped.")

    @property
    def files(self) -> tuple[Path, ...]:
        """File of the model."""
        return (self.model,)


class FastTextClassifierConfig(_ClassifierConfig):
    """A supervised fastText model (Joulin et al. 2016), .bin or .ftz; the text is scored as one line."""

    kind: Literal["fasttext_classifier"] = "fasttext_classifier"


class LinearClassifierConfig(_ClassifierConfig):
    """A linear model over hashed words, word n-grams and character n-grams, as `tools/train_classifier.py` trains."""

    kind: Literal["linear_classifier"] = "linear_classifier"


Bucket = Literal["head", "middle", "tail"]


class PerplexityConfig(NamedRuleConfig):
    """Perplexity under an n-gram language model (CCNet; Wenzek et al. 2020), per line, with end-of-line tokens.

    Documents below `head_max_perplexity` are the head, those above `tail_min_perplexity` the tail, the rest the middle.
    """

    kind: Literal["perplexity"] = "perplexity"
    model: LocalPath = Field(description="Language model: .arpa or .arpa.gz, or KenLM's binary with `backend: kenlm`.")
    backend: Literal["kenlm", "arpa"] = Field(
        "kenlm", description="kenlm: the library, which is an extra; arpa: our own reader of ARPA files, slower."
    )
    sentencepiece_model: LocalPath | None = Field(
        None, description="SentencePiece model that splits lines; null: white space does."
    )
    normalize: Literal["ccnet", "none"] = Field(
        "ccnet", description="ccnet: lower case, no accents, digits as 0, plain punctuation, no control characters."
    )
    head_max_perplexity: float = Field(
        300.0, gt=0, description="Perplexity; the default is an example: take your own thirds."
    )
    tail_min_perplexity: float = Field(
        1_000.0, gt=0, description="Perplexity; the default is an example: take your own thirds."
    )
    keep: tuple[Bucket, ...] = Field(("head", "middle"), description="Buckets that stay.")

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        violations = []
        if self.head_max_perplexity > self.tail_min_perplexity:
            message = (
                f"{self.head_max_perplexity:g} lies above tail_min_perplexity={self.tail_min_perplexity:g}, so that no "
                "middle is left. Lower head_max_perplexity or raise tail_min_perplexity."
            )
            violations.append(Violation("head_max_perplexity", message))
        if set(self.keep) in (set(), {"head", "tail"}):
            kept = " and ".join(self.keep) or "nothing"
            violations.append(Violation("keep", f"{kept} cannot stay alone. Keep neighbours, such as [head, middle]."))
        raise_violations(violations)
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of the models."""
        return (self.model, *([self.sentencepiece_model] if self.sentencepiece_model else []))
