"""Configuration of the rules that edit documents line by line: C4 in three dialects, and
RefinedWeb's corrections.

Removed lines are counted by reason, in the funnel and in the columns of each document.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import NamedRuleConfig

Share = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class _BaseC4Config(NamedRuleConfig):
    """Fields of all C4 dialects."""

    curly_brackets: Literal["drop_page", "keep"] = Field(
        "drop_page", description="Action on `{`. C4 takes it for code and drops the page."
    )


class C4Config(_BaseC4Config):
    """C4's line and page filters (Raffel et al. 2020) with the constants and the order of the
    published code.
    """

    kind: Literal["c4"] = "c4"
    max_page_characters: Count = Field(
        190_000, description="Maximum characters of a page; longer pages are dropped. 0: no limit."
    )
    max_word_length: Count = Field(
        1_000, description="Maximum characters of a word; lines with a longer word are removed."
    )
    min_words_per_line: Count = Field(
        5, description="Minimum whitespace-separated words of a line; lines with fewer are removed."
    )
    min_sentences: Count = Field(3, description="Minimum sentences in the remaining lines.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"'),
        description="Remove lines that end with none of these, or with `...`. Empty: off.",
    )


class C4DatatroveConfig(_BaseC4Config):
    """C4's filters with datatrove's constants; FineWeb uses them with `end_marks: []`."""

    kind: Literal["c4_datatrove"] = "c4_datatrove"
    max_word_length: Count = Field(
        1_000, description="Maximum characters of a word; lines with a longer word are removed."
    )
    min_words_per_line: Count = Field(
        3, description="Minimum whitespace-separated words of a line; lines with fewer are removed."
    )
    min_sentences: Count = Field(5, description="Minimum sentences in the remaining lines.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"', "'"),
        description="Remove lines that end with none of these, or with `...`. Empty: off.",
    )


class C4DolmaConfig(_BaseC4Config):
    """C4's filters as in dolma: the tagger c4_v2 with the published mixing.

    "javascript" and "lorem ipsum" anywhere drop a page. Citations and policy lines stay. Sentences
    are not counted.
    """

    kind: Literal["c4_dolma"] = "c4_dolma"
    min_words_per_line: Count = Field(
        3, description="Minimum whitespace-separated words of a line; lines with fewer are removed."
    )
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"'), description="Remove lines that end with none of these. Empty: off."
    )


class LineCorrectionsConfig(NamedRuleConfig):
    """Remove or correct lines that are not prose (RefinedWeb; Penedo et al. 2023, G.2), counted by
    reason.

    A page is dropped when the removed share of its words exceeds `max_removed_word_share`.
    """

    kind: Literal["line_corrections"] = "line_corrections"
    max_upper_case_share: Share = Field(
        0.5,
        description="Maximum of upper-case characters / characters of a line; lines above are "
        "removed.",
    )
    numeric_lines: Literal["take_out", "keep"] = Field(
        "take_out", description="Remove lines that consist of digits."
    )
    counter_words: tuple[str, ...] = Field(
        ("likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes",
            "downvotes",
         "downloads", "views", "followers"),
        description="Remove lines that consist of a number and one of these words (`3 likes`). "
        "Empty: off.",
    )  # fmt: skip
    min_words_per_line: Count = Field(
        2,
        description="Minimum whitespace-separated words of a line; lines with fewer are removed, "
        "except empty ones.",
    )
    navigation_anywhere: tuple[str, ...] = Field(
        ("items in cart",),
        description="Phrases to cut from short lines, at any position; case-insensitive.",
    )
    navigation_end: tuple[str, ...] = Field(
        ("read more...",), description="Phrases to cut from the end of short lines."
    )
    navigation_start: tuple[str, ...] = Field(
        ("sign-in",), description="Phrases to cut from the start of short lines."
    )
    max_navigation_words: Count = Field(
        10, description="Maximum words of a short line, for the phrases above."
    )
    max_removed_word_share: Share = Field(
        0.05, description="Maximum of removed words / original words; pages above are dropped."
    )
