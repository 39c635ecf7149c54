"""Sections of the document quality rules: the tagged union `RuleConfig`.

Scripts and stop words of `native_text` come from the profile of the document's language unless the rule sets them.

Invariants:
- Every threshold defaults to the published value, so a rule without fields is the published rule.
- `max_…` drops values above the limit and `min_…` values below it. A value equal to the limit passes.
"""

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from llmsys.config.custom_rules import (
    BadWordsConfig,
    FastTextClassifierConfig,
    LinearClassifierConfig,
    PerplexityConfig,
)
from llmsys.config.line_rules import (
    C4Config,
    C4DatatroveConfig,
    C4DolmaConfig,
    Count,
    LineCorrectionsConfig,
    NamedRuleConfig,
    Share,
)
from llmsys.config.section import Violation, raise_violations

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
    """Limits on foreign scripts, garbage characters, missing stop words, and mixed Chinese variants.

    Drops pages that are in another script, decoded with the wrong encoding, or lists of keywords.
    """

    kind: Literal["native_text"] = "native_text"
    scripts: tuple[Script, ...] = Field((), description="Scripts of the language; empty: as the profile says, or any.")
    min_script_share: Fraction = Field(0.5, description="Letters of these scripts / letters. MNBVC asks for 0.7.")
    max_garbage_share: Fraction = Field(
        0.01, description="Characters that come of wrong decoding (U+FFFD, controls, private use) / characters."
    )
    min_stop_word_share: Fraction = Field(0.0, description="Words that are `stop_words` / words.")
    stop_words: tuple[str, ...] = Field((), description="Common words; empty: as the profile says.")
    max_mixed_variant_share: Fraction = Field(
        1.0, description="Characters of the rarer of simplified and traditional Chinese / characters of either."
    )


# Tools that share the published thresholds measure different things; see data_pipeline/README.md.
Dialect = Literal["datatrove", "paper", "dolma", "dclm"]


class GopherRepetitionConfig(NamedRuleConfig):
    """Repeated paragraphs, lines and n-grams (Rae et al. 2021, table A1), measured as the dialect's tool does."""

    kind: Literal["gopher_repetition"] = "gopher_repetition"
    dialect: Dialect = Field("datatrove", description="Whose reading; dolma has no test on paragraphs.")
    max_duplicate_paragraph_share: Share = Field(0.30, description="Repeated paragraphs / paragraphs.")
    max_duplicate_paragraph_character_share: Share = Field(0.20, description="Their characters / characters.")
    max_duplicate_line_share: Share = Field(0.30, description="Repeated lines / lines.")
    max_duplicate_line_character_share: Share = Field(0.20, description="Their characters / characters.")
    max_top_2gram_share: Share = Field(0.20, description="Characters of the most frequent word pair / characters.")
    max_top_3gram_share: Share = Field(0.18, description="The same of three words.")
    max_top_4gram_share: Share = Field(0.16, description="The same of four words.")
    max_duplicate_5gram_share: Share = Field(0.15, description="Characters in repeated runs of 5 words / characters.")
    max_duplicate_6gram_share: Share = Field(0.14, description="The same of 6 words.")
    max_duplicate_7gram_share: Share = Field(0.13, description="The same of 7 words.")
    max_duplicate_8gram_share: Share = Field(0.12, description="The same of 8 words.")
    max_duplicate_9gram_share: Share = Field(0.11, description="The same of 9 words.")
    max_duplicate_10gram_share: Share = Field(0.10, description="The same of 10 words.")


class GopherQualityConfig(NamedRuleConfig):
    """Word counts, word lengths, symbols, bullets and stop words (Rae et al. 2021, A.1.1), by dialect."""

    kind: Literal["gopher_quality"] = "gopher_quality"
    dialect: Dialect = Field("datatrove", description="Whose reading; descriptions below are datatrove's.")
    min_words: Count = Field(50, description="Words that are not punctuation alone.")
    max_words: Count = Field(100_000, description="Words that are not punctuation alone.")
    min_mean_word_length: Share = Field(
        3.0, description="Characters per word that is not punctuation alone (dolma: the median)."
    )
    max_mean_word_length: Share = Field(
        10.0, description="Characters per word that is not punctuation alone (dolma: the median)."
    )
    max_hash_ratio: Share = Field(0.1, description="`#` signs per word. Not for dolma and dclm.")
    max_ellipsis_ratio: Share = Field(0.1, description="`...` and `…` per word. Not for dolma and dclm.")
    max_symbol_ratio: Share = Field(0.1, description="Both together per word, for dolma and dclm alone.")
    max_bullet_line_share: Share = Field(0.9, description="Lines that start with `•` or `-` / lines.")
    max_ellipsis_line_share: Share = Field(0.3, description="Lines that end with `...` or `…` / lines.")
    min_alphabetic_word_share: Share = Field(0.8, description="Words with a letter / words.")
    min_stop_words: Count = Field(2, description="How many of `stop_words` must occur; case matters.")
    stop_words: tuple[str, ...] = Field(
        ("the", "be", "to", "of", "and", "that", "have", "with"), description="Words of which some must occur."
    )

    @model_validator(mode="after")
    def _check_dialect_limits(self) -> Self:
        together = self.dialect in ("dolma", "dclm")
        idle = ("max_hash_ratio", "max_ellipsis_ratio") if together else ("max_symbol_ratio",)
        instead = "max_symbol_ratio" if together else "max_hash_ratio and max_ellipsis_ratio"
        raise_violations(
            Violation(name, f"{getattr(self, name):g} decides nothing in the dialect {self.dialect}. Set {instead}.")
            for name in idle
            if getattr(self, name) != type(self).model_fields[name].default
        )
        return self


class FinewebQualityConfig(NamedRuleConfig):
    """FineWeb's line filters (Penedo et al. 2024), with the constants of its code."""

    kind: Literal["fineweb_quality"] = "fineweb_quality"
    min_end_mark_line_share: Share = Field(0.12, description="Lines that end with terminal punctuation / lines.")
    short_line_characters: Count = Field(30, description="A line of at most so many characters is short.")
    max_short_line_share: Share = Field(0.67, description="Short lines / lines.")
    max_duplicate_line_character_share: Share = Field(
        0.01,
        description="Characters in repeated lines / characters without newlines. The paper says 0.1, its code 0.01.",
    )
    max_newlines_per_word: Share = Field(0.3, description="Newlines per word.")


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
    | PerplexityConfig
    | FinewebQualityConfig
    | NativeTextConfig,
    Field(discriminator="kind"),
]

RULE_KINDS: tuple[str, ...] = tuple(rule.model_fields["kind"].default for rule in get_args(get_args(RuleConfig)[0]))
