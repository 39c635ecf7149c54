"""Replace e-mail addresses, public IP addresses, telephone numbers, bank accounts, payment cards,
national ids and access keys in texts.

E-mail addresses in ASCII and IPv4 addresses are those of datatrove's expressions. Letters of other
alphabets are part of an address too (RFC 6531). Letters of scripts without spaces are part of it
only if nothing else is on their side of the `@`, because otherwise they are the text around it.

Replacements are addresses and numbers that belong to nobody: example.com and example.org (RFC
2606), the documentation networks (RFC 5737, RFC 3849), telephone numbers 555-0100 to 555-0199,
IBANs of a country XX (ISO 3166 leaves it to users), cards of the issuer 000000, and ids that begin
with six zeros.

IPv6 addresses (RFC 4291) are groups of hexadecimal digits, `::` once, IPv4 at the end.

Invariants:
- Time is linear in the text: e-mail addresses are searched around each `@`, other patterns have a
  bounded length, that of IPv6 at most 45 characters; `checked_numbers.py` and `access_keys.py`
  have their own.
- Spans are sorted and do not overlap.
- A replacement is a function of the seed and the match (and, if configured, the document's id)."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from ipaddress import AddressValueError, IPv6Address
from typing import assert_never
from unicodedata import category

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.cleaning import PiiKind, PiiReplacementConfig
from llmsys.data_pipeline.text.access_keys import find_access_keys
from llmsys.data_pipeline.text.checked_numbers import find_cards, find_ibans, find_national_ids

# Public addresses begin with 2 or 3, or are IPv4 after the NAT64 prefix (RFC 6052); times and MAC
# addresses do not.
_CANDIDATE = re.compile(
    r"(?<![\w:.])(?:[23][0-9A-Fa-f]{3}|0{0,2}64:[fF][fF]9[bB]):[0-9A-Fa-f:]{1,35}(?:(?:\.[0-9]{1,3}){3})?(?![\w])"
)
# IANA's registry of special IPv6 addresses that are not global and begin with 2 or 3.
_NOT_GLOBAL_IPV6 = tuple(
    (int(IPv6Address(first)) >> (128 - length), 128 - length)
    for first, length in (("2001:2::", 48), ("2001:10::", 28), ("2001:db8::", 32), ("3fff::", 20))
)


def find_ipv6(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of public IPv6 addresses, without brackets, zone and prefix length."""
    for found in _CANDIDATE.finditer(text):
        written = found[0]
        if written.endswith(":") and not written.endswith("::"):
            written = written[:-1]  # the colon of a sentence
        elif written.endswith(":::"):
            continue
        if is_public_ipv6(written):
            yield found.start(), found.start() + len(written)


def is_public_ipv6(address: str) -> bool:
    """Return whether an IPv6 address is well-formed and globally reachable."""
    try:
        value = int(IPv6Address(address))
    except AddressValueError:
        return False
    return not any(value >> shift == prefix for prefix, shift in _NOT_GLOBAL_IPV6)


Span = tuple[int, int]

_ASCII_ATOM = frozenset(
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-"
)
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_LITERAL = rf"\[(?:{_BYTE}\.){{3}}(?:{_BYTE}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]"
# Thai, Lao, Myanmar, Khmer, kana, Han: written without spaces, so that text and address may touch.
_UNSPACED = ((0xE00, 0xEFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
             (0x20000, 0x3FFFF))  # fmt: skip
_MAX_UNSPACED = 64  # characters of a local part (RFC 5321)
_IP = re.compile(rf"(?:{_BYTE}\.){{3}}{_BYTE}")

# IANA's registry of special IPv4 addresses that are not global, as first address and length of the
# prefix. Copied here because Python's own table changes between releases, and the output must not.
_NOT_GLOBAL = (
    ("0.0.0.0", 8), ("10.0.0.0", 8), ("100.64.0.0", 10), ("127.0.0.0", 8), ("169.254.0.0", 16),
    ("172.16.0.0", 12),
    ("192.0.0.0", 24), ("192.0.2.0", 24), ("192.168.0.0", 16), ("198.18.0.0", 15), ("198.51.100.0",
        24),
    ("203.0.113.0", 24), ("240.0.0.0", 4),
)  # fmt: skip
_GLOBAL_ALL_THE_SAME = ("192.0.0.9", "192.0.0.10")

# +49 30 901820, +1 (212) 555-0123: the plus, then groups of digits with at most two symbols between
# them. Or as written in North America: (212) 555-0123, 212-555-0123, 212.555.0123; the two symbols
# must be there, or it is any number.
_PHONE = re.compile(
    r"(?<![\w+])\+[1-9][0-9]{0,3}(?:[ .\-()/]{0,2}[0-9]{1,6}){1,6}(?![\w+])"
    r"|(?<![\w.+\-(])(?:1[ .-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[ .-])"
    r"[2-9][0-9]{2}[ .-][0-9]{4}(?![\w-]|\.[0-9])"
)
_PHONE_DIGITS = range(8, 16)  # E.164 allows 15


def _is_unspaced(character: str) -> bool:
    code = ord(character)
    return code >= _UNSPACED[0][0] and any(first <= code <= last for first, last in _UNSPACED)


@cache
def _list_letters() -> tuple[str, str]:
    """Return non-ASCII letters, marks and digits as character classes: those of scripts with
    spaces, and without.

    Planes after the second contain Han only.
    """
    codes = [
        code
        for code in range(0x80, 0x20000)
        if chr(code).isalnum() or category(chr(code))[0] == "M"
    ]
    ranges: list[list[int]] = []
    for code in codes:
        if not _is_unspaced(chr(code)):
            if ranges and code == ranges[-1][1] + 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    spaced, unspaced = (
        "".join(f"{chr(a)}-{chr(b)}" for a, b in found) for found in (ranges, _UNSPACED)
    )
    return spaced, unspaced


@cache
def _build_domain_pattern() -> re.Pattern[str]:
    """Build the pattern of a host name; each label has letters of scripts with spaces, or of
    scripts without.
    """
    spaced, unspaced = (f"A-Za-z0-9{letters}" for letters in _list_letters())
    label = (
        rf"(?:[{spaced}](?:[{spaced}-]*[{spaced}])?|[{unspaced}](?:[{unspaced}-]*[{unspaced}])?)"
    )
    return re.compile(rf"(?:{label}\.)+{label}|{_LITERAL}")


def _is_atom(character: str) -> bool:
    """Return whether a character can be in a local part: ASCII, or a letter, mark or digit of a
    script with spaces.
    """
    if character.isascii():
        return character in _ASCII_ATOM
    return (character.isalnum() or category(character)[0] == "M") and not _is_unspaced(character)


def find_emails(text: str) -> Iterator[Span]:
    """Find e-mail addresses: a dotted local part after a word boundary, `@`, a host name with a
    dot.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    end = 0
    at = text.find("@")
    while at >= 0:
        begin = _find_local_part(text, end, at)
        found = _build_domain_pattern().match(text, at + 1) if begin < at else None
        if found:
            end = found.end()
            yield begin, end
        at = text.find("@", max(at + 1, end))


def _find_local_part(text: str, first: int, at: int) -> int:
    """Return the start of the local part before position `at`, not before `first`; `at` if there
    is none.
    """
    begin = at
    if begin > first and _is_unspaced(text[begin - 1]):
        while begin > max(first, at - _MAX_UNSPACED) and (
            _is_unspaced(text[begin - 1]) or text[begin - 1].isalnum()
        ):
            begin -= 1
        return begin
    while begin > first and (
        _is_atom(text[begin - 1]) or (text[begin - 1] == "." and text[begin : begin + 1] != ".")
    ):
        if text[begin - 1] == "." and begin == at:
            return at
        begin -= 1
    while begin < at and not (text[begin] != "." and _is_boundary(text, begin)):
        begin += 1
    return begin


def _is_boundary(text: str, position: int) -> bool:
    before = position > 0 and _is_word_character(text[position - 1])
    return before != _is_word_character(text[position])


def _is_word_character(character: str) -> bool:
    if character.isascii():
        return character.isalnum() or character == "_"
    return _is_atom(character)


def find_ips(text: str) -> Iterator[Span]:
    """Find public IP addresses; as in datatrove, a longer row of numbers counts by its first four.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    end = 0
    longer = find_ipv6(text) if ":" in text else iter(())
    next_longer = next(longer, None)
    for found in _IP.finditer(text):
        while next_longer and next_longer[0] < found.end():
            yield next_longer
            end = next_longer[1]
            next_longer = next(longer, None)
        if found.start() >= end and is_public(found[0]):
            yield found.span()
    if next_longer:
        yield next_longer
    yield from longer


def is_public(address: str) -> bool:
    """Return whether an IPv4 address is well-formed, without leading zeros, and globally
    reachable.
    """
    parts = address.split(".")
    if any(len(part) > 1 and part.startswith("0") for part in parts):
        return False
    value = _parse_address(address)
    return address in _GLOBAL_ALL_THE_SAME or not any(
        value >> shift == prefix for prefix, shift in _PREFIXES
    )


def _parse_address(address: str) -> int:
    return int.from_bytes(bytes(map(int, address.split("."))), "big")


_PREFIXES = tuple(
    (_parse_address(address) >> (32 - length), 32 - length) for address, length in _NOT_GLOBAL
)


def find_phones(text: str) -> Iterator[Span]:
    """Find telephone numbers: international ones of 8 to 15 digits, and North American ones.

    Args:
        text: The text.

    Yields:
        Their spans, in characters.
    """
    for found in _PHONE.finditer(text):
        if sum(map(str.isdigit, found[0])) in _PHONE_DIGITS:
            yield found.span()


Counts = dict[PiiKind, np.ndarray[tuple[int], np.dtype[np.int64]]]

_FIND: dict[PiiKind, Callable[[str], Iterator[Span]]] = {
    "email": find_emails, "ip": find_ips, "phone": find_phones, "iban": find_ibans,
    "card": find_cards, "national_id": find_national_ids, "secret": find_access_keys,
}  # fmt: skip
# Necessary condition for a match; tested for all texts at once.
_NEEDS: dict[PiiKind, str] = {
    "email": "@",
    "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]|64:[fF][fF]9[bB]:",
    "phone": r"\+[1-9]|[0-9][ .)-]{1,2}[2-9][0-9]{2}[ .-]",
    "iban": r"[A-Z]{2}[0-9]{2} ?[A-Z0-9]{4}",
    "card": r"[0-9]{14}|[0-9]{4}[ -][0-9]{4}",
    "national_id": r"[0-9]{15}|[12][0-9]{4}2[AB][0-9]{6}|[12] [0-9]{2} [0-9]{2} [0-9][0-9AB] [0-9]"
    r"|[A-Z]{6}[0-9L-V]{2}[A-Z]|[0-9]{3}\.[0-9]{3}\.[0-9]{3}-",
    "secret": r"AKIA|ASIA|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AIza|k_live_|hf_|PRIVATE KEY--",
}  # fmt: skip
_EMAILS = ("email@example.com", "firstname.lastname@example.org")
_NETWORKS = ("192.0.2", "198.51.100", "203.0.113")


def replace_pii(
    texts: pa.Array, ids: Sequence[str], config: PiiReplacementConfig
) -> tuple[pa.Array, Counts]:
    """Replace personal data in texts.

    Args:
        texts: N texts (string or large_string).
        ids: N ids of documents, for replacements per document.
        config: kinds, seed and replacements.

    Returns:
        The texts, and for each kind the number of matches in each text, (N,) int64.
    """
    counts: Counts = {}
    for kind in config.kinds:
        counts[kind] = np.zeros(len(texts), np.int64)
        suspects = np.flatnonzero(
            pc.match_substring_regex(texts, _NEEDS[kind]).to_numpy(zero_copy_only=False)
        )
        if not len(suspects):
            continue
        changed = texts.to_pylist()
        for row in suspects.tolist():
            name = ids[row] if config.consistency == "document" else ""
            changed[row], counts[kind][row] = _replace_matches(changed[row], kind, name, config)
        texts = pa.array(changed, texts.type)
    return texts, counts


def _replace_matches(
    text: str, kind: PiiKind, name: str, config: PiiReplacementConfig
) -> tuple[str, int]:
    pieces = []
    position = 0
    count = 0
    for begin, end in _FIND[kind](text):
        pieces += [text[position:begin], choose_replacement(kind, text[begin:end], name, config)]
        position = end
        count = count + 1
    return ("".join([*pieces, text[position:]]), count) if count else (text, 0)


def choose_replacement(kind: PiiKind, match: str, name: str, config: PiiReplacementConfig) -> str:
    """Choose the replacement of a match.

    Args:
        kind: Kind of personal data.
        match: The text that is replaced.
        name: The document's id; "" for equal replacements in all documents.
        config: The section `data.pii`.

    Returns:
        A token such as `<EMAIL>`, or a reserved address or number that follows from match, name
        and seed.
    """
    if config.replacement == "token":
        return f"<{kind.upper()}>"
    data = f"{kind}\0{name}\0{match}".encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8, key=str(config.seed).encode()).digest()
    number = int.from_bytes(digest, "big")
    match kind:
        case "email":
            return _EMAILS[number % len(_EMAILS)]
        case "ip" if ":" in match:
            return f"2001:db8::{number % 0xFFFF + 1:x}:{number // 0xFFFF % 0xFFFF + 1:x}"
        case "ip":
            # 1 to 254: neither the network nor its broadcast address.
            return f"{_NETWORKS[number % len(_NETWORKS)]}.{number // len(_NETWORKS) % 254 + 1}"
        case "phone":
            return f"+1 {200 + number % 800}-555-01{number // 800 % 100:02d}"
        case "iban":
            return f"XX00{number % 10**16:016d}"
        case "card":
            digits = f"{number % 10**10:010d}"
            return f"0000 00{digits[:2]} {digits[2:6]} {digits[6:]}"
        case "national_id":
            return f"000000{number % 10**6:06d}"
        case "secret":
            return f"EXAMPLE-SECRET-{number % 10**8:08d}"
        case unreachable:
            assert_never(unreachable)


def sum_counts(counts: Counts, kinds: Iterable[PiiKind]) -> dict[str, int]:
    """Sum the matches of all texts for the funnel.

    Args:
        counts: matches per text, from `replace_pii`.
        kinds: the kinds to sum.

    Returns:
        `{"email replaced": 3, ...}`.
    """
    return {f"{kind} replaced": int(counts[kind].sum()) for kind in kinds}
