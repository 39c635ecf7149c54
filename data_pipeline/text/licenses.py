"""Licences that source files state, by identifiers of SPDX (https://spdx.org/licenses).

A tag `SPDX-License-Identifier` decides. Without it the wording of the common headers does, in
the beginning and the end of a file, and short statements such as `License: MIT`. A family without
a version or number of clauses, such as "BSD-style license", is `unknown`, but for the GPL: without
a version any may be chosen (GPL-2.0, section 9).

Invariants:
- The result depends on the text alone. Nothing is guessed from the name of a project.
"""

import re
from collections.abc import Sequence
from functools import lru_cache

from llmsys.config.source_code import UNKNOWN

# Headers are at the start; manuals within Perl's and Ruby's files state theirs at the end.
_HEAD = 8_000
_TAIL = 4_000

_TAG = re.compile(r"^(?:[^\w\n]|dnl|rem|REM)*SPDX-License-Identifier:[ \t]*([^\n]*)", re.MULTILINE)
_EXPRESSION = re.compile(r"\(*[A-Za-z0-9][\w.+-]*\)*(?:\s+(?:OR|AND|WITH)\s+\(*[\w.+-]+\)*)*")
_HINTS = ("licen", "redistribut", "permission", "public domain", "same terms", "gpl")
# Marks of comments, line ends and quotes between the words of a header.
_BETWEEN_WORDS = re.compile(r"[\s*#/;!%\"'`|<>{}\\_-]+")

# Wording in lower case, with one space for everything that `_BETWEEN_WORDS` matches.
_GNU = re.compile(
    r"\bgnu (?P<kind>lesser |library |affero )?(?:\(?or library\)? )?general public licen[cs]e|"
    r"\b(?P<short>lgpl|agpl|gpl)(?=v?\d|\b)"
)
_VERSION_BEFORE = re.compile(
    r"(?:version|v\.?) ?(?P<number>[123](?:\.\d)?)(?P<later>,? or (?:\(at your option\) )?"
    r"(?:any )?later(?: version)?)?,? (?:\(?of (?:the )?|of the licen[cs]e,? )?$"
)
_VERSION = re.compile(
    r"[\s,.()a-z:]{0,130}?\b(?:version|v\.?|l?gpl) ?(?P<number>[123](?:\.\d)?)\b(?P<rest>.{0,90})|"
    r" ?v?(?P<short>[123](?:\.\d)?)\b(?P<short_rest>.{0,40})"
)
_LATER = re.compile(r"\+|,? ?(?:of the licen[cs]e)?,? ?\(?(?:or|and),? ?"
                    r"\(?(?:at your option\)?,? )?"
                    r"(?:\(at your option\) ?)?(?:any )?(?:later|newer|above|higher)")  # fmt: skip
_GRANT = r"(?:under|terms of|licen[cs]ed?|licen[cs]e:|released|distributed)"
_PERL = "Artistic-1.0-Perl OR GPL-1.0-or-later"
_PERMISSION = (
    r"permission to use, copy, modify,?(?: and)?(?: or)? distribute this software for any purpose "
    r"with or without fee is hereby granted"
)
# Licence, a word without which its wording cannot be there (finding it is fast), wording.
_RULES: tuple[tuple[str, str, str], ...] = (
    ("Unlicense", "unencumbered",
     r"this is free and unencumbered software released into the public domain"),
    ("CC0-1.0", "cc0",
     r"cc0 1\.0\b|cc0\b.{0,40}public domain dedication|"
     r"under (?:the )?(?:terms of )?(?:the )?cc0\b"),
    ("CC0-1.0", "publicdomain", r"creativecommons\.org publicdomain zero 1\.0"),
    ("BSL-1.0", "boost", r"boost software licen[cs]e,? version 1\.0"),
    ("Zlib", "to anyone to use", r"permission is granted to anyone to use this software for any "
     r"purpose, including commercial applications"),
    ("MPL-2.0", "mozilla", r"mozilla public licen[cs]e,? (?:v\.|version|v) ?2\.0"),
    ("MPL-1.1", "mozilla", r"mozilla public licen[cs]e,? version 1\.1"),
    ("Apache-2.0", "apache",
     r"apache licen[cs]e,? \(?(?:version|v\.?)? ?2(?:\.0)?\b|apache 2\.0 licen[cs]e|"
     r"apache\.org licenses licen[cs]e 2\.0|licen[cs]e: ?apache (?:2\.0|licen[cs]e)|"
     r"apache 2\.0 with llvm exception"),
    ("EPL-2.0", "eclipse", r"eclipse public licen[cs]e,? (?:v|version|v\.) ?2\.0"),
    ("EPL-1.0", "eclipse", r"eclipse public licen[cs]e,? (?:v|version|v\.) ?1\.0"),
    ("MIT", "free of charge",
     r"permission is hereby granted, free of charge, to any person obtaining a copy"
     r"(?! of the font)"),
    ("MIT", " mit", _GRANT + r" (?:under |by )?(?:the )?"
     r"(?:terms (?:and conditions )?(?:of|from) )?(?:the )?mit"
     r"(?: x11| style)?(?: licen[cs]e|\b(?= (?:or|and)\b))|licen[cs]e:? (?:is )?(?:the )?mit\b|"
     r"[ (]mit licen[cs]ed\b|licenses mit\b"),
    ("MIT", "(mit licen", r"\(mit licen[cs]ed?\)"),
    ("0BSD", "with or without fee", _PERMISSION + r"\."),
    ("ISC", "with or without fee", _PERMISSION + r", provided that the above"),
    ("ISC", " isc", r"under (?:the )?(?:terms of )?(?:the )?isc licen[cs]e|licen[cs]e: ?isc\b"),
    ("PSF-2.0", " psf ", r"(?:under (?:the )?(?:terms of )?(?:the )?psf "
     r"licen[cs]e|licen[cs]e: psf\b)"),
    (_PERL, "perl", r"(?:under|on) the same terms as (?:the )?perl\b|"
     r"same terms (?:and conditions )?as perl"),
    (_PERL, "artistic", r"either the gnu general public licen[cs]e or the artistic licen[cs]e|"
     r"artistic licen[cs]e or the gnu general public licen[cs]e"),
    ("Artistic-2.0", "artistic", r"artistic licen[cs]e,?(?: \(?version)? 2\.0"),
)  # fmt: skip
_WORDINGS = tuple((name, word, re.compile(text)) for name, word, text in _RULES)
_BSD = re.compile(
    r"redistribution and use in source and binary forms,? (?:of .{0,60}?)?with or without "
    r"modification,? (?:is|are) permitted"
)
_BSD_NAMED = re.compile(
    r"(?:new|modified|3 ?clause|three clause|bsd 3|revised) bsd|bsd ?3 ?clause|3 clause \(?bsd|"
    r"(?P<two>simplified bsd|2 ?clause bsd|bsd ?2 ?clause|two clause bsd|freebsd licen[cs]e)"
)
_ENDORSE = re.compile(r"endorse or promote|neither the names?|names? of .{0,60}may not be used")
# Words for a choice between the licenses that a file names.
_CHOICES = (
    "dual", "alternatively", "terms of either", "choice of one", "one of two licen",
    "your choice", "either the mit", "either the bsd", "either the apache",
    "your option, either", "your option, under", "mit or ", "gpl or ", "bsd or ", "license or ",
    "license, or ",
)  # fmt: skip
_EXCEPTIONS = (
    ("GCC-exception-3.1", re.compile(r"gcc runtime library exception")),
    ("LLVM-exception", re.compile(r"with llvm exceptions?")),
)

# Names that datasets and package indexes use for licenses, in lower case.
_FIELD_NAMES = {
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "mit license": "MIT",
    "isc license": "ISC",
    "the unlicense": "Unlicense",
}
_NO_LICENCES = frozenset(
    ("", "none", "no_license", "noassertion", "other", "unknown", "unlicensed", "null")
)
_SPELLINGS = {name.lower(): name for name in re.findall(
    r"\S+",
    "AGPL-3.0-only AGPL-3.0-or-later Apache-2.0 Artistic-2.0 BSD-2-Clause BSD-3-Clause "
    "BSD-4-Clause BSL-1.0 CC-BY-4.0 CC-BY-SA-4.0 CC0-1.0 EPL-1.0 EPL-2.0 GPL-1.0-or-later "
    "GPL-2.0-only GPL-2.0-or-later GPL-3.0-only GPL-3.0-or-later ISC LGPL-2.0-or-later "
    "LGPL-2.1-only LGPL-2.1-or-later LGPL-3.0-only LGPL-3.0-or-later MIT MIT-0 MPL-1.1 MPL-2.0 "
    "MS-PL OFL-1.1 PSF-2.0 Unlicense WTFPL Zlib 0BSD"
,
)}  # fmt: skip
_GNU_ID = re.compile(r"((?:A|L)?GPL-\d\.\d)(\+?)", re.IGNORECASE)


def find_license(text: str) -> str:
    """Return the license that a source file states.

    Args:
        text: Its text.

    Returns:
        An identifier of SPDX, several joined by AND or OR, or `unknown`.
    """
    head = text[:_HEAD]
    if "SPDX" in head and (tags := _find_tags(head)):
        return tags
    parts = [text] if len(text) <= _HEAD + _TAIL else [head, text[-_TAIL:]]
    for part in parts:
        lowered = part.lower()
        if any(hint in lowered for hint in _HINTS):
            found = _find_wordings(_BETWEEN_WORDS.sub(" ", lowered))
            if found != UNKNOWN:
                return found
    return UNKNOWN


def _find_tags(head: str) -> str:
    """Return the expression of the tags, "" without one that is an expression."""
    matches = (_EXPRESSION.match(tag[1].strip()) for tag in _TAG.finditer(head))
    found = list(dict.fromkeys(_spell_expression(match[0]) for match in matches if match))
    return _strip_parentheses(found[0]) if len(found) == 1 else " AND ".join(found)


def _strip_parentheses(expression: str) -> str:
    """Return an expression without a pair of parentheses around all of it."""
    inner = expression[1:-1]
    is_whole = expression.startswith("(") and expression.endswith(")")
    if is_whole and inner.find(")") >= inner.find("(") and inner.count("(") == inner.count(")"):
        return inner
    return expression


def _find_wordings(words: str) -> str:
    found = [name for name, word, wording in _WORDINGS if word in words and wording.search(words)]
    if "MIT" in found and "except as contained in this notice" in words:
        found[found.index("MIT")] = "X11"
    found += _find_bsd(words) + _find_gnu(words, found)
    if not found:
        return UNKNOWN
    for number, name in enumerate(found):
        for exception, wording in _EXCEPTIONS:
            fits = name.startswith("GPL-3" if exception.startswith("GCC") else "Apache")
            if fits and wording.search(words):
                found[number] = f"{name} WITH {exception}"
    # not sorted: Perl's choice is one entry
    return (" OR " if any(choice in words for choice in _CHOICES) else " AND ").join(
        dict.fromkeys(found)
    )


def _find_bsd(words: str) -> list[str]:
    if "redistribution and use" in words and (start := _BSD.search(words)):
        conditions = words[start.end() : start.end() + 2_500]
        if "all advertising materials mentioning" in conditions:
            return ["BSD-4-Clause"]
        return ["BSD-3-Clause" if _ENDORSE.search(conditions) else "BSD-2-Clause"]
    named = _BSD_NAMED.search(words) if "bsd" in words else None
    if named is None:
        return []
    before = words[max(0, named.start() - 50) : named.start()]
    if not re.search(_GRANT, before) and not words[named.end() :].startswith(" licen"):
        return []
    return ["BSD-2-Clause" if named["two"] else "BSD-3-Clause"]


def _find_gnu(words: str, others: Sequence[str]) -> list[str]:
    """Return the GNU licenses that are named with a grant, unless another entry has them."""
    is_named = "gpl" in words or "general public" in words
    if not is_named or any("GPL" in name for name in others):
        return []
    found: dict[str, str] = {}  # by name and version: later mentions leave out "or later"
    unversioned = []
    for match in _GNU.finditer(words):
        before = words[max(0, match.start() - 130) : match.start()]
        if not re.search(_GRANT, before) and not words[match.end() :].startswith(" licen"):
            continue
        kind = match["short"] or (match["kind"] or "gpl").strip()
        prefix = {"lesser": "LGPL", "library": "LGPL", "affero": "AGPL"}.get(kind, kind.upper())
        number, later = _find_gnu_version(words, match, before)
        if number is not None:
            number = number if "." in number else f"{number}.0"
            name = f"{prefix}-{number}"
            found.setdefault(name, f"{name}-{'or-later' if later else 'only'}")
        elif prefix == "GPL":
            unversioned = ["GPL-1.0-or-later"]
    return list(found.values()) or unversioned


def _find_gnu_version(words: str, name: re.Match[str], before: str) -> tuple[str | None, bool]:
    """Return the version next to the name of a license, and whether later ones may be chosen."""
    if earlier := _VERSION_BEFORE.search(before[-60:]):
        return earlier["number"], bool(earlier["later"])
    version = _VERSION.match(words, name.end())
    if version is None:
        return None, False
    rest = version["rest"] or version["short_rest"] or ""
    return version["number"] or version["short"], bool(_LATER.match(rest))


@lru_cache(maxsize=4_096)
def _spell_expression(expression: str) -> str:
    """Return an expression of SPDX with the spelling of the list."""
    return " ".join(map(_spell_id, expression.split()))


def _spell_id(name: str) -> str:
    bare = name.strip("()")
    if match := _GNU_ID.fullmatch(bare):  # the deprecated identifiers; GPL-2.0 means -only
        spelled = f"{match[1].upper()}-{'or-later' if match[2] else 'only'}"
    else:
        spelled = _SPELLINGS.get(bare.lower(), bare)
    return name.replace(bare, spelled)


def convert_field(value: object) -> str:
    """Return the license of a field of the input.

    Args:
        value: An identifier or name, a list of them, or None.

    Returns:
        An identifier or expression of SPDX; those of a list are joined by AND, because all of
        them were found. `unknown` for a name of no license.
    """
    names = value if isinstance(value, list | tuple) else [value]
    found = sorted({_convert_name(str(name or "").strip()) for name in names} - {UNKNOWN})
    return (
        " AND ".join(f"({one})" if " OR " in one and len(found) > 1 else one for one in found)
        or UNKNOWN
    )


def _convert_name(name: str) -> str:
    if name.lower() in _NO_LICENCES:
        return UNKNOWN
    if known := _FIELD_NAMES.get(name.lower()):
        return known
    if _EXPRESSION.fullmatch(name):
        return _spell_expression(name)
    return _find_wordings(_BETWEEN_WORDS.sub(" ", f"license: {name.lower()} license"))


def is_allowed(license: str, allowed: frozenset[str]) -> bool:
    """Return whether a license may be kept.

    Args:
        license: What `find_license` or `convert_field` returned, but not `unknown`.
        allowed: Identifiers in lower case. `gpl-2.0` stands for `-only` and `-or-later`.

    Returns:
        True if every identifier is allowed; for choices (OR) without AND, if one is.
    """
    parts = re.split(r"\s+(?:AND|OR)\s+", license)
    ids = [part.strip("() ").split(" WITH ")[0].lower() for part in parts]
    fits = [
        one in allowed or one.removesuffix("-only").removesuffix("-or-later") in allowed
        for one in ids
    ]
    return all(fits) if " AND " in license else any(fits)
