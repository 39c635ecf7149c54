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
        description="What the rule is called in funnel, reasons and columns; empty: as its kind.",
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
                f"rules.{number}",
                f"{name} stands at rules.{first} already, and what a rule drops is counted by its name. Give it a name "
                f"of its own, such as name: {name}_2.",
            )
        # Another rule's kind counts as taken: the meaning of `gopher_quality` must not depend on the config.
        elif rule.name and name in taken and name != getattr(rule, "kind", ""):
            yield Violation(
                f"rules.{number}.name",
                f"{name} is what a stage or another kind of rule is called. Take another name, such as my_{name}.",
            )


Share = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]


class _BaseC4Config(NamedRuleConfig):
    """Fields of all C4 dialects."""

    curly_brackets: Literal["drop_page", "keep"] = Field(
        "drop_page", description="What `{` does: C4 takes it for code and drops the page."
    )


class C4Config(_BaseC4Config):
    """C4's line and page filters (Raffel et al. 2020) with the constants and the order of the published code."""

    kind: Literal["c4"] = "c4"
    max_page_characters: Count = Field(190_000, description="Characters; a longer page is dropped. 0: no limit.")
    max_word_length: Count = Field(1_000, description="Characters; a line with a longer word is taken out.")
    min_words_per_line: Count = Field(5, description="Words split at white space; lines with fewer are taken out.")
    min_sentences: Count = Field(3, description="Sentences in the lines that stay.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"'), description="A line that ends with none of them, or with `...`, is taken out; empty: off."
    )


class C4DatatroveConfig(_BaseC4Config):
    """C4's filters with datatrove's constants; FineWeb uses them with `end_marks: []`."""

    kind: Literal["c4_datatrove"] = "c4_datatrove"
    max_word_length: Count = Field(1_000, description="Characters; a line with a longer word is taken out.")
    min_words_per_line: Count = Field(3, description="Words split at white space; lines with fewer are taken out.")
    min_sentences: Count = Field(5, description="Sentences in the lines that stay.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"', "'"),
        description="A line that ends with none of them, or with `...`, is taken out; empty: off.",
    )


class C4DolmaConfig(_BaseC4Config):
    """C4's filters as in dolma: the tagger c4_v2 with the published mixing.

    "javascript" and "lorem ipsum" anywhere drop a page. Citations and policy lines stay. Sentences are not counted.
    """

    kind: Literal["c4_dolma"] = "c4_dolma"
    min_words_per_line: Count = Field(3, description="Words split at white space; lines with fewer are taken out.")
    end_marks: tuple[str, ...] = Field(
        (".", "?", "!", '"'), description="A line that ends with none of them is taken out; empty: off."
    )


class LineCorrectionsConfig(NamedRuleConfig):
    """Remove or correct lines that are not prose (RefinedWeb; Penedo et al. 2023, G.2), counted by reason.

    A page is dropped when the removed share of its words exceeds `max_removed_word_share`.
    """

    kind: Literal["line_corrections"] = "line_corrections"
    max_upper_case_share: Share = Field(
        0.5, description="Upper-case characters / characters of a line; a line above it is taken out."
    )
    numeric_lines: Literal["take_out", "keep"] = Field("take_out", description="Lines that are digits alone.")
    counter_words: tuple[str, ...] = Field(
        ("likes", "shares", "comments", "retweets", "reposts", "quotes", "bookmarks", "upvotes", "downvotes",
         "downloads", "views", "followers"),
        description="A line of a number and one of these words (`3 likes`) is taken out; empty: off.",
    )  # fmt: skip
    min_words_per_line: Count = Field(
        2, description="Words split at white space; lines with fewer are taken out. Empty lines stay."
    )
    navigation_anywhere: tuple[str, ...] = Field(
        ("items in cart",), description="Cut out of short lines wherever it stands; case does not matter."
    )
    navigation_end: tuple[str, ...] = Field(("read more...",), description="The same at the end of a line.")
    navigation_start: tuple[str, ...] = Field(("sign-in",), description="The same at its start.")
    max_navigation_words: Count = Field(10, description="Words of a line in which navigation is looked for.")
    max_removed_word_share: Share = Field(0.05, description="Words taken out / words before; a page above it goes.")
