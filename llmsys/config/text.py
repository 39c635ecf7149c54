"""What a YAML file can say about text: extraction, language and the rules that keep or drop documents.

Reads nothing, gives `ExtractConfig`, `LanguageConfig` and the tagged union `RuleConfig`. Every threshold is a field
whose default is the published one, so that a rule without fields is the published rule. A limit named `max_…` drops
what lies above it, one named `min_…` drops what lies below it, and a value equal to its limit always stays.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.base import Section

Share = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class ExtractConfig(Section):
    """How an HTML page becomes text."""

    kind: Literal["resiliparse"] = Field("resiliparse", description="Extractor; resiliparse parses with C++ (lexbor).")
    main_content: bool = Field(True, description="Leave out navigation, footers, banners and the like.")
    max_page_bytes: int = Field(
        5_242_880, ge=1, description="Bytes of HTML; a longer page is skipped and counted. Common Crawl cuts at 5 MiB."
    )
    max_depth: int = Field(
        1_000,
        ge=1,
        description="Nested elements; of a deeper page all text stays: finding its main content takes too long.",
    )


class LanguageConfig(Section):
    """Which languages stay, and how sure the identification must be."""

    kind: Literal["py3langid"] = Field("py3langid", description="Identifier; its model ships inside the package.")
    keep: tuple[str, ...] = Field(("en",), description="ISO 639-1 codes that stay; empty: every language stays.")
    minimum_score: float = Field(0.65, ge=0, le=1, description="Probability the best language must exceed.")
    sample_characters: int = Field(4_096, ge=1, description="Characters of the beginning of the text that are read.")


class GopherRepetitionConfig(Section):
    """Repeated paragraphs, lines and n-grams (Rae et al. 2021, table A1), as datatrove decides them."""

    kind: Literal["gopher_repetition"] = "gopher_repetition"
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


class GopherQualityConfig(Section):
    """Word counts, word lengths, symbols, bullets and stop words (Rae et al. 2021, A.1.1), as datatrove decides
    them.
    """

    kind: Literal["gopher_quality"] = "gopher_quality"
    min_words: Count = Field(50, description="Words that are not punctuation alone.")
    max_words: Count = Field(100_000, description="Words that are not punctuation alone.")
    min_mean_word_length: Share = Field(3.0, description="Characters per word that is not punctuation alone.")
    max_mean_word_length: Share = Field(10.0, description="Characters per word that is not punctuation alone.")
    max_hash_ratio: Share = Field(0.1, description="`#` signs per word.")
    max_ellipsis_ratio: Share = Field(0.1, description="`...` and `…` per word.")
    max_bullet_line_share: Share = Field(0.9, description="Lines that start with `•` or `-` / lines.")
    max_ellipsis_line_share: Share = Field(0.3, description="Lines that end with `...` or `…` / lines.")
    min_alphabetic_word_share: Share = Field(0.8, description="Words with a letter / words.")
    min_stop_words: Count = Field(2, description="How many of `stop_words` must occur; case matters.")
    stop_words: tuple[str, ...] = Field(
        ("the", "be", "to", "of", "and", "that", "have", "with"), description="Words of which some must occur."
    )


class _C4Lines(Section):
    """What both readings of C4 have in common."""

    max_word_length: Count = Field(1_000, description="Characters; a line with a longer word is taken out.")
    curly_brackets: Literal["drop_page", "keep"] = Field(
        "drop_page", description="What `{` in a line that stays does: C4 takes it for code and drops the page."
    )


class C4Config(_C4Lines):
    """Lines and pages of C4 (Raffel et al. 2020) with the constants of its published code."""

    kind: Literal["c4"] = "c4"
    min_words_per_line: Count = Field(5, description="Words split at white space; lines with fewer are taken out.")
    min_sentences: Count = Field(3, description="Sentences in the lines that stay.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"'), description="A line that ends with none of them, or with `...`, is taken out; empty: off."
    )


class C4DatatroveConfig(_C4Lines):
    """Lines and pages of C4 with datatrove's constants; FineWeb uses it with `end_marks: []`."""

    kind: Literal["c4_datatrove"] = "c4_datatrove"
    min_words_per_line: Count = Field(3, description="Words split at white space; lines with fewer are taken out.")
    min_sentences: Count = Field(5, description="Sentences in the lines that stay.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"', "'"),
        description="A line that ends with none of them, or with `...`, is taken out; empty: off.",
    )


class FinewebQualityConfig(Section):
    """FineWeb's own tests on lines (Penedo et al. 2024), with the constants of the code."""

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
    GopherRepetitionConfig | GopherQualityConfig | C4Config | C4DatatroveConfig | FinewebQualityConfig,
    Field(discriminator="kind"),
]
