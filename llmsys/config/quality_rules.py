"""Sections of the document quality rules: the tagged union `RuleConfig`.

Scripts and stop words of `native_text` come from the profile of the document's language unless the
rule sets them.

Invariants:
- Every threshold defaults to the published value, so a rule without fields is the published rule.
- `max_…` drops values above the limit and `min_…` values below it. A value equal to the limit
  passes.
"""

from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationInfo, field_validator

from llmsys.config.custom_rules import (
    AnnotatorConfig,
    BadWordsConfig,
    EncoderClassifierConfig,
    FastTextClassifierConfig,
    LinearClassifierConfig,
    MapperConfig,
    PerplexityConfig,
    PythonRuleConfig,
)
from llmsys.config.line_rules import (
    C4Config,
    C4DatatroveConfig,
    C4DolmaConfig,
    Count,
    LineCorrectionsConfig,
    Share,
)
from llmsys.config.section import NamedRuleConfig, raise_violation
from llmsys.config.source_code import SourceCodeConfig

Fraction = Annotated[float, Field(ge=0, le=1)]

Script = Literal[
    "Arabic",
    "Armenian",
    "Bengali",
    "Cyrillic",
    "Devanagari",
    "Ethiopic",
    "Georgian",
    "Greek",
    "Gujarati",
    "Gurmukhi",
    "Han",
    "Hangul",
    "Hebrew",
    "Hiragana",
    "Kannada",
    "Katakana",
    "Khmer",
    "Lao",
    "Latin",
    "Malayalam",
    "Myanmar",
    "Oriya",
    "Sinhala",
    "Tamil",
    "Telugu",
    "Thai",
    "Tibetan",
]


class NativeTextConfig(NamedRuleConfig):
    """Limits on foreign scripts, garbage characters, missing stop words, and mixed Chinese
    variants.

    Drops pages that are in another script, decoded with the wrong encoding, or lists of keywords.
    """

    kind: Literal["native_text"] = "native_text"
    scripts: tuple[Script, ...] = Field(
        (), description="Scripts of the language. Empty: those of the profile, or any."
    )
    min_script_share: Fraction = Field(
        0.5, description="Minimum of letters of these scripts / letters. MNBVC: 0.7."
    )
    max_garbage_share: Fraction = Field(
        0.01,
        description="Maximum of characters from wrong decoding (U+FFFD, controls, private use) / "
        "characters.",
    )
    min_stop_word_share: Fraction = Field(
        0.0, description="Minimum of words in `stop_words` / words."
    )
    stop_words: tuple[str, ...] = Field(
        (), description="Common words. Empty: those of the profile."
    )
    max_mixed_variant_share: Fraction = Field(
        1.0,
        description="Maximum of characters of the rarer variant of Chinese / characters that are "
        "only simplified or only traditional.",
    )


# Tools that share the published thresholds measure different things; see data_pipeline/README.md.
Dialect = Literal["datatrove", "paper", "dolma", "dclm"]


class GopherRepetitionConfig(NamedRuleConfig):
    """Repeated paragraphs, lines and n-grams (Rae et al. 2021, table A1), measured as the
    dialect's tool does.
    """

    kind: Literal["gopher_repetition"] = "gopher_repetition"
    dialect: Dialect = Field(
        "datatrove", description="Implementation to follow; dolma does not test paragraphs."
    )
    max_duplicate_paragraph_share: Share = Field(
        0.30, description="Maximum of repeated paragraphs / paragraphs."
    )
    max_duplicate_paragraph_character_share: Share = Field(
        0.20, description="Maximum of characters in repeated paragraphs / characters."
    )
    max_duplicate_line_share: Share = Field(0.30, description="Maximum of repeated lines / lines.")
    max_duplicate_line_character_share: Share = Field(
        0.20, description="Maximum of characters in repeated lines / characters."
    )
    max_top_2gram_share: Share = Field(
        0.20, description="Maximum of characters in the most frequent 2-gram / characters."
    )
    max_top_3gram_share: Share = Field(
        0.18, description="Maximum of characters in the most frequent 3-gram / characters."
    )
    max_top_4gram_share: Share = Field(
        0.16, description="Maximum of characters in the most frequent 4-gram / characters."
    )
    max_duplicate_5gram_share: Share = Field(
        0.15, description="Maximum of characters in repeated 5-grams / characters."
    )
    max_duplicate_6gram_share: Share = Field(
        0.14, description="Maximum of characters in repeated 6-grams / characters."
    )
    max_duplicate_7gram_share: Share = Field(
        0.13, description="Maximum of characters in repeated 7-grams / characters."
    )
    max_duplicate_8gram_share: Share = Field(
        0.12, description="Maximum of characters in repeated 8-grams / characters."
    )
    max_duplicate_9gram_share: Share = Field(
        0.11, description="Maximum of characters in repeated 9-grams / characters."
    )
    max_duplicate_10gram_share: Share = Field(
        0.10, description="Maximum of characters in repeated 10-grams / characters."
    )


class GopherQualityConfig(NamedRuleConfig):
    """Word counts, word lengths, symbols, bullets and stop words (Rae et al. 2021, A.1.1), by
    dialect.
    """

    kind: Literal["gopher_quality"] = "gopher_quality"
    dialect: Dialect = Field(
        "datatrove", description="Implementation to follow; the descriptions below are datatrove's."
    )
    min_words: Count = Field(50, description="Minimum words, not counting punctuation.")
    max_words: Count = Field(100_000, description="Maximum words, not counting punctuation.")
    min_mean_word_length: Share = Field(
        3.0,
        description="Minimum mean characters per word, not counting punctuation (dolma: median).",
    )
    max_mean_word_length: Share = Field(
        10.0,
        description="Maximum mean characters per word, not counting punctuation (dolma: median).",
    )
    max_hash_ratio: Share = Field(
        0.1,
        validate_default=False,
        description="Maximum `#` signs per word. Not in dolma and dclm.",
    )
    max_ellipsis_ratio: Share = Field(
        0.1,
        validate_default=False,
        description="Maximum `...` and `…` per word. Not in dolma and dclm.",
    )
    max_symbol_ratio: Share = Field(
        0.1,
        validate_default=False,
        description="Maximum `#` signs and ellipses per word. Only in dolma and dclm.",
    )
    max_bullet_line_share: Share = Field(
        0.9, description="Maximum of lines that start with `•` or `-` / lines."
    )
    max_ellipsis_line_share: Share = Field(
        0.3, description="Maximum of lines that end with `...` or `…` / lines."
    )
    min_alphabetic_word_share: Share = Field(
        0.8, description="Minimum of words with a letter / words."
    )
    min_stop_words: Count = Field(
        2, description="Minimum number of `stop_words` that must occur; case-sensitive."
    )
    stop_words: tuple[str, ...] = Field(
        ("the", "be", "to", "of", "and", "that", "have", "with"),
        description="Common words, for min_stop_words.",
    )

    @field_validator("max_hash_ratio", "max_ellipsis_ratio", "max_symbol_ratio")
    @classmethod
    def _check_dialect_limit(cls, limit: float, info: ValidationInfo) -> float:
        together, field = info.data.get("dialect") in ("dolma", "dclm"), info.field_name or ""
        if together != (field == "max_symbol_ratio") and limit != cls.model_fields[field].default:
            instead = "max_symbol_ratio" if together else "max_hash_ratio and max_ellipsis_ratio"
            raise_violation(
                "",
                f"{limit:g} has no effect in the dialect {info.data.get('dialect')}. "
                f"Set {instead}.",
            )
        return limit


class FinewebQualityConfig(NamedRuleConfig):
    """FineWeb's line filters (Penedo et al. 2024), with the constants of its code."""

    kind: Literal["fineweb_quality"] = "fineweb_quality"
    min_end_mark_line_share: Share = Field(
        0.12, description="Minimum of lines that end with terminal punctuation / lines."
    )
    short_line_characters: Count = Field(30, description="Maximum characters of a short line.")
    max_short_line_share: Share = Field(0.67, description="Maximum of short lines / lines.")
    max_duplicate_line_character_share: Share = Field(
        0.01,
        description="Maximum of characters in repeated lines / characters without newlines. The "
        "paper gives 0.1, its code 0.01.",
    )
    max_newlines_per_word: Share = Field(0.3, description="Maximum newlines per word.")


RuleConfig = Annotated[
    GopherRepetitionConfig
    | GopherQualityConfig
    | C4Config
    | C4DatatroveConfig
    | C4DolmaConfig
    | LineCorrectionsConfig
    | BadWordsConfig
    | FastTextClassifierConfig
    | LinearClassifierConfig
    | EncoderClassifierConfig
    | PerplexityConfig
    | FinewebQualityConfig
    | NativeTextConfig
    | SourceCodeConfig
    | PythonRuleConfig
    | AnnotatorConfig
    | MapperConfig,
    Field(discriminator="kind"),
]


def list_rule_sections() -> dict[str, type[NamedRuleConfig]]:
    """Return the section of each kind of rule.

    Returns:
        Classes by kind, in the order of the union.
    """
    return {rule.model_fields["kind"].default: rule for rule in get_args(get_args(RuleConfig)[0])}


RULE_KINDS: tuple[str, ...] = tuple(
    rule.model_fields["kind"].default for rule in get_args(get_args(RuleConfig)[0])
)
