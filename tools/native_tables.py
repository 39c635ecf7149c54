"""Write the constants of the Python extractor as tables of the compiled core, so that words and
patterns have one source, and what Unicode says of characters.

    python -m tools.native_tables

Reads the modules of `data_pipeline/extract`, writes `native/tables.h`. With a Python that has the
version of Unicode that the core uses, it writes `native/unicode_tables.h` too. A test compares the
files with what this script makes.
"""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path

from llmsys.data_pipeline.core.native import UNICODE_VERSION
from llmsys.data_pipeline.extract import (
    boilerplate,
    content_score,
    formulas,
    html_tree,
    main_content,
    superscripts,
    text_layout,
)

PATH = Path(__file__).resolve().parent.parent / "native" / "tables.h"
UNICODE_PATH = PATH.with_name("unicode_tables.h")

# Elements that lexbor serializes without an end tag (WHATWG HTML, 13.1.2, and obsolete ones).
VOID = [
    "area", "base", "basefont", "bgsound", "br", "col", "embed", "frame", "hr", "img", "input",
    "keygen", "link", "meta", "param", "source", "track", "wbr",
]  # fmt: skip


def format_text(text: str) -> str:
    """Format a C string in ASCII."""
    plain = "".join(
        f"\\{byte:03o}" if byte >= 127 or byte < 32 or byte in b'"\\?' else chr(byte)
        for byte in text.encode()
    )
    return f'"{plain}"'


def list_choices(pattern: str) -> list[str]:
    """List the texts that an expression of `_FOLLOWED` matches: groups without groups inside."""
    start = pattern.find("(?:")
    if start < 0:
        return [pattern]
    end = pattern.index(")", start)
    rest = pattern[end + 1 :]
    choices = pattern[start + 3 : end].split("|")
    if rest.startswith("?"):
        rest = rest[1:]
        choices.append("")
    return [pattern[:start] + choice + more for choice in choices for more in list_choices(rest)]


def list_other_cases(wanted: Iterable[str]) -> list[tuple[int, int]]:
    """List pairs of a character outside of ASCII and the wanted one that it equals in any case."""
    everything = "".join(
        map(
            chr, [point for point in range(128, sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
        )
    )
    return sorted(
        (ord(found), ord(letter))
        for letter in wanted
        for found in re.findall(re.escape(letter), everything, re.IGNORECASE)
        if found != letter
    )


def list_upper_cases(wanted: Iterable[str]) -> list[tuple[int, int]]:
    """List pairs of a character outside of ASCII and the wanted one that it is in lower case."""
    letters = frozenset(wanted)
    return [
        (point, ord(chr(point).lower()))
        for point in range(128, sys.maxunicode + 1)
        if chr(point).lower() in letters and chr(point).lower() != chr(point)
    ]


def format_names(name: str, numbers: Mapping[str, int]) -> str:
    """Format a table of `NameTable`."""
    entries = ", ".join(f"{{{format_text(word)}, {number}}}" for word, number in numbers.items())
    return f"constexpr NamedNumber {name}[] = {{{entries}}};"


def format_phrases() -> list[str]:
    """Format the first words of phrases and what follows them."""
    ends: list[str] = []
    ranges: list[str] = []
    texts: list[str] = []
    for pattern in main_content._FOLLOWED.values():
        first = len(ends)
        for choice in [] if pattern == "." else list_choices(pattern):
            text = choice.removesuffix("\\b")
            assert re.fullmatch(r"[\w @©:]+", text), pattern
            texts.append(text)
            ends.append(f"{{{format_text(text)}, {str(choice.endswith(chr(92) + 'b')).lower()}}}")
        ranges.append(f"{{{first}, {len(ends)}}}")
    words = {word: number for number, word in enumerate(main_content._FOLLOWED)}
    around = ", ".join(str(ord(character)) for character in main_content._AROUND)
    return [
        format_names("PHRASE_WORDS", words),
        f"constexpr size_t LONGEST_PHRASE_WORD = {max(len(word.encode()) for word in words)};",
        f"constexpr PhraseRange PHRASE_RANGES[] = {{{', '.join(ranges)}}};",
        f"constexpr PhraseEnd PHRASE_ENDS[] = {{{', '.join(ends)}}};",
        f"constexpr uint32_t PHRASE_AROUND[] = {{{around}}};",
        format_texts("PHRASES_GLUED", main_content._GLUED),
        format_pairs("LOWER_CASE", list_upper_cases(sorted(set("".join(words))))),
        format_pairs("EQUAL_CASE", list_other_cases(sorted(set("".join(texts))))),
    ]


def format_pairs(name: str, pairs: Iterable[tuple[int, int]]) -> str:
    """Format pairs of code points."""
    entries = ", ".join(f"{{{first}, {second}}}" for first, second in pairs)
    return f"constexpr uint32_t {name}[][2] = {{{entries}}};"


def format_tags() -> list[str]:
    """Format the block elements and the sets of them; a set is a number with a bit for each."""
    blocks = {name: number for number, name in enumerate(html_tree._BLOCKS, start=1)}
    numbers = {"#": 0, **blocks}
    sets = {
        "HEADINGS": html_tree.HEADINGS,
        "KEPT_EMPTY": {name.removeprefix("/") for name in html_tree._KEPT_EMPTY},
        "SHAPES": content_score._SHAPES,
        "OWN_RUN": {"body", "article", "main"},
        "SIDE": boilerplate._SIDE_TAGS,
        "NEVER": boilerplate._NEVER,
        "BOXES": main_content._BOXES,
        "LINK_LISTS": main_content._LINK_LISTS,
        "NO_PHRASES": main_content._NO_PHRASES,
        "LISTS": text_layout._LISTS,
    }
    tags = ", ".join(f"TAG_{name} = {number}" for name, number in blocks.items())
    removed = dict.fromkeys(html_tree._UNREAD_SELECTOR.split(","), 1)
    return [
        f"enum Tag {{TAG_ROOT = 0, {tags}}};",
        format_names("BLOCK_NAMES", blocks),
        format_names("UNREAD_NAMES", dict.fromkeys(html_tree._UNREAD, 1)),
        format_names("REMOVED_NAMES", removed),
        format_names("VOID_NAMES", dict.fromkeys(VOID, 1)),
        *(
            f"constexpr uint64_t TAGS_{name} = {sum(1 << numbers[tag] for tag in tags_of_set)}ull;"
            for name, tags_of_set in sets.items()
        ),
    ]


def format_texts(name: str, texts: Iterable[str]) -> str:
    """Format a list of texts."""
    return f"constexpr const char* {name}[] = {{{', '.join(map(format_text, texts))}}};"


def format_formulas() -> list[str]:
    """Format what pages with formulas, superscripts and discussions are recognized by."""
    limits = {
        "SUPERSCRIPT_WINDOW": superscripts._WINDOW,
        "LONGEST_SUPERSCRIPT": superscripts._LONGEST_SUPERSCRIPT,
        "LONGEST_SUBSCRIPT": superscripts._LONGEST_SUBSCRIPT,
        "LEAST_UNSCRIPTED": html_tree._LEAST_UNSCRIPTED,
    }
    return [
        f"constexpr const char* FORMULA_SCRIPT_TYPE = {format_text(formulas.SCRIPT_TYPE)};",
        format_texts("FORMULA_CLASSES", formulas.IMAGE_CLASSES),
        format_texts("FORMULA_CLASS_BEGINNINGS", formulas.IMAGE_CLASS_BEGINNINGS),
        format_texts("FORMULA_SOURCES", formulas.IMAGE_SOURCES),
        *(f"constexpr int64_t {name} = {limit};" for name, limit in limits.items()),
        format_texts("DISCUSSION_TYPES", (name.decode() for name in html_tree._DISCUSSION_TYPES)),
        format_texts("PRODUCT_TYPES", (name.decode() for name in html_tree._PRODUCT_TYPES)),
        format_texts("LONG_BASES", sorted(superscripts._LONG_BASES)),
        f"constexpr const char* ABBREVIATING = {format_text(superscripts._ABBREVIATING)};",
    ]


def format_flags() -> list[str]:
    """Format the words of attributes and their flags."""
    names = ("SIDE", "MAIN", "BODY", "HIDDEN", "TEASER", "GUTTER", "BOX", "COMMENT", "REVIEW")
    flags = ", ".join(f"FLAG_{name} = {getattr(boilerplate, name)}" for name in names)
    return [f"enum Flag {{{flags}}};", format_names("NAME_FLAGS", boilerplate._FLAGS)]


def format_tables() -> str:
    """Format the whole file."""
    return "\n".join([
        "// Written by `python -m tools.native_tables` from data_pipeline/extract: do not edit.",
        "#pragma once",
        "",
        "#include <cstddef>",
        "#include <cstdint>",
        "",
        "namespace llmsys {",
        "",
        "struct NamedNumber {const char* name; int number;};",
        "struct PhraseRange {int first; int last;};",
        "struct PhraseEnd {const char* text; bool ends_word;};",
        *format_tags(),
        *format_flags(),
        *format_formulas(),
        *format_phrases(),
        "",
        "}  // namespace llmsys",
        "",
    ])  # fmt: skip


def list_ranges(is_member: Callable[[str], object]) -> list[tuple[int, int]]:
    """List the first and last code points of the ranges of characters with a property."""
    ranges: list[tuple[int, int]] = []
    for point in range(sys.maxunicode + 1):
        if is_member(chr(point)):
            first = ranges.pop()[0] if ranges and ranges[-1][1] == point - 1 else point
            ranges.append((first, point))
    return ranges


def format_unicode_tables() -> str:
    """Format what the Unicode of the running Python says of characters."""
    simple_lower = import_module("_sre").unicode_tolower
    extra = import_module("re._casefix")._EXTRA_CASES
    word = re.compile(r"\w")
    digit = re.compile(r"\d")
    tables = {
        "LETTERS": list_ranges(str.isalpha),
        "WORD_CHARACTERS": list_ranges(word.match),
        "DIGITS": list_ranges(digit.match),
        "SPACES": list_ranges(str.isspace),
        "COMBINING_MARKS": list_ranges(lambda each: unicodedata.category(each)[0] == "M"),
        "PUNCTUATION_MARKS": list_ranges(lambda each: unicodedata.category(each)[0] == "P"),
        "ASSIGNED": list_ranges(lambda each: unicodedata.category(each) != "Cn"),
        "LOWER_CASES": [
            (point, simple_lower(point))
            for point in range(sys.maxunicode + 1)
            if simple_lower(point) != point
        ],
        "EXTRA_CASES": [(lower, other) for lower, others in extra.items() for other in others],
    }
    return "\n".join([
        "// Written by `python -m tools.native_tables` from the Unicode database of Python,",
        f"// version {unicodedata.unidata_version}: do not edit.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "",
        "namespace llmsys {",
        "",
        *(format_pairs(name, pairs) for name, pairs in tables.items()),
        "",
        "}  // namespace llmsys",
        "",
    ])  # fmt: skip


def main() -> None:
    """Write the files."""
    PATH.write_text(format_tables())
    print(PATH)
    if unicodedata.unidata_version == UNICODE_VERSION:
        UNICODE_PATH.write_text(format_unicode_tables())
        print(UNICODE_PATH)


if __name__ == "__main__":
    main()
