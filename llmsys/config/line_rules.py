"""Configuration of the rules that edit documents line by line: C4 in three dialects, and RefinedWeb's corrections.

Removed lines are counted by reason, in the funnel and in the columns of each document.

`NamedRuleConfig` is the base section of all document rules: the name used in the funnel, drop reasons, columns and
commands. The default name is the kind. A rule needs an explicit name when a config has two rules of its kind, such as
two word lists or two classifier scores."""

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section, Violation


class NamedRuleConfig(Section):
    """One rule. Subclasses add the `kind` field."""

    name: str = Field(
        "",
        pattern="^([a-z][a-z0-9_]*)?$",
        max_length=60,
        description="Name of the rule in funnel, reasons and columns. Empty: its kind.",
    )

    @property
    def title(self) -> str:
        """The name, or the kind if the name is empty."""
        return self.name or str(getattr(self, "kind", ""))


def find_name_violations(rules: Sequence[NamedRuleConfig], taken: Collection[str]) -> Iterator[Violation]:
    """Yield a violation for every rule whose name is already used by another rule or is in `taken`."""
    names = [rule.title for rule in rules]
    for number, (rule, name) in enumerate(zip(rules, names, strict=True)):
        if name in names[:number]:
            first = names.index(name)
            yield Violation(
                f"{number}",
                f"{name} is already the name of rules.{first}, and drops are counted by name. Give it another "
                f"name, such as name: {name}_2.",
            )
        # Another rule's kind counts as taken: the meaning of `gopher_quality` must not depend on the config.
        elif rule.name and name in taken and name != getattr(rule, "kind", ""):
            yield Violation(
                f"{number}.name",
                f"{name} is the name of a stage or of another kind of rule. Use another name, such as my_{name}.",
            )


Share = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class _BaseC4Config(NamedRuleConfig):
    """Fields of all C4 dialects."""

    curly_brackets: Literal["drop_page", "keep"] = Field(
        "drop_page", description="Action on `{`. C4 takes it for code and drops the page."
    )


class C4Config(_BaseC4Config):
    """C4's line and page filters (Raffel et al. 2020) with the constants and the order of the published code."""

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
        (".", "?", "!", '"'), description="Remove lines that end with none of these, or with `...`. Empty: off."
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

    "javascript" and "lorem ipsum" anywhere drop a page. Citations and policy lines stay. Sentences are not counted.
    """

    kind: Literal["c4_dolma"] = "c4_dolma"
    min_words_per_line: Count = Field(
        3, description="Minimum whitespace-separated words of a line; lines with fewer are removed."
    )
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"'), description="Remove lines that end with none of these. Empty: off."
    )


class LineCorrectionsConfig(NamedRuleConfig):
    """Remove or correct lines that are not prose (RefinedWeb; Penedo et al. 2023, G.2), counted by reason.

    A page is dropped when the removed share of its words exceeds `max_removed_word_share`.
    """

    kind: Literal["line_corrections"] = "line_corrections"
    max_upper_case_share: Share = Field(
        0.5, description="Maximum of upper-case characters / characters of a line; lines above are removed."
    )
    numeric_lines: Literal["take_out", "keep"] = Field("take_out", description="Remove lines that consist of digits.")
    counter_words: tuple[str, ...] = Field(
        ("likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes",
         "downloads", "views", "followers"),
        description="Remove lines that consist of a number and one of these words (`3 likes`). Empty: off.",
    )  # fmt: skip
    min_words_per_line: Count = Field(
        2, description="Minimum whitespace-separated words of a line; lines with fewer are removed, except empty ones."
    )
    navigation_anywhere: tuple[str, ...] = Field(
        ("items in cart",), description="Phrases to cut from short lines, at any position; case-insensitive."
    )
    navigation_end: tuple[str, ...] = Field(
        ("read more...",), description="Phrases to cut from the end of short lines."
    )
    navigation_start: tuple[str, ...] = Field(("sign-in",), description="Phrases to cut from the start of short lines.")
    max_navigation_words: Count = Field(10, description="Maximum words of a short line, for the phrases above.")
    max_removed_word_share: Share = Field(
        0.05, description="Maximum of removed words / original words; pages above are dropped."
    )
