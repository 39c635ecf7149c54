"""Where personal data stand in a text: e-mail addresses, public IPv4 addresses, telephone numbers.

Reads a text, gives spans in its order that do not overlap. E-mail and IP addresses are what datatrove's expressions
match. Every search is linear in the text, however it is made: e-mail addresses are looked for around each `@`, and the
other patterns have a bounded length.
"""

import re
from collections.abc import Iterator

Span = tuple[int, int]

_ATOM = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789!#$%&'*+/=?^_`{|}~-")
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_DOMAIN = re.compile(
    rf"(?:{_LABEL}\.)+{_LABEL}|\[(?:{_BYTE}\.){{3}}(?:{_BYTE}|[A-Za-z0-9-]*[A-Za-z0-9]:)\]"
)  # fmt: skip
_IP = re.compile(rf"(?:{_BYTE}\.){{3}}{_BYTE}")

# IANA's registry of special IPv4 addresses that are not global, as first address and length of the prefix. Written down
# here because Python's own table changes between its releases, and the output must not.
_NOT_GLOBAL = (
    ("0.0.0.0", 8), ("10.0.0.0", 8), ("100.64.0.0", 10), ("127.0.0.0", 8), ("169.254.0.0", 16), ("172.16.0.0", 12),
    ("192.0.0.0", 24), ("192.0.2.0", 24), ("192.168.0.0", 16), ("198.18.0.0", 15), ("198.51.100.0", 24),
    ("203.0.113.0", 24), ("240.0.0.0", 4),
)  # fmt: skip
_GLOBAL_ALL_THE_SAME = ("192.0.0.9", "192.0.0.10")

# +49 30 901820, +1 (212) 555-0123: the plus, then groups of digits with at most two symbols between them. Or as written
# in North America: (212) 555-0123, 212-555-0123, 212.555.0123; the two symbols must be there, or it is any number.
_PHONE = re.compile(
    r"(?<![\w+])\+[1-9][0-9]{0,3}(?:[ .\-()/]{0,2}[0-9]{1,6}){1,6}(?![\w+])"
    r"|(?<![\w.+\-(])(?:1[ .-])?(?:\([2-9][0-9]{2}\) ?|[2-9][0-9]{2}[ .-])[2-9][0-9]{2}[ .-][0-9]{4}(?![\w-]|\.[0-9])"
)
_PHONE_DIGITS = range(8, 16)  # E.164 allows 15


def find_emails(text: str) -> Iterator[Span]:
    """Yield the spans of e-mail addresses: a dotted local part behind a word boundary, `@`, a host name with a dot."""
    end = 0
    at = text.find("@")
    while at >= 0:
        begin = _local_part(text, end, at)
        found = _DOMAIN.match(text, at + 1) if begin < at else None
        if found:
            end = found.end()
            yield begin, end
        at = text.find("@", max(at + 1, end))


def _local_part(text: str, first: int, at: int) -> int:
    """Where the local part before position `at` begins, not before `first`; `at` when there is none."""
    begin = at
    while begin > first and (text[begin - 1] in _ATOM or (text[begin - 1] == "." and text[begin : begin + 1] != ".")):
        if text[begin - 1] == "." and begin == at:
            return at
        begin -= 1
    while begin < at and not (text[begin] != "." and _is_boundary(text, begin)):
        begin += 1
    return begin


def _is_boundary(text: str, position: int) -> bool:
    before = position > 0 and _in_word(text[position - 1])
    return before != _in_word(text[position])


def _in_word(character: str) -> bool:
    return character.isalnum() or character == "_"


def find_ips(text: str) -> Iterator[Span]:
    """Yield the spans of public IPv4 addresses. As in datatrove a longer row of numbers counts by its first four."""
    for found in _IP.finditer(text):
        if is_public(found[0]):
            yield found.span()


def is_public(address: str) -> bool:
    """Whether an IPv4 address is well-formed, without leading zeros, and reached from everywhere."""
    parts = address.split(".")
    if any(len(part) > 1 and part.startswith("0") for part in parts):
        return False
    value = _number(address)
    return address in _GLOBAL_ALL_THE_SAME or not any(value >> shift == prefix for prefix, shift in _PREFIXES)


def _number(address: str) -> int:
    return int.from_bytes(bytes(map(int, address.split("."))), "big")


_PREFIXES = tuple((_number(address) >> (32 - length), 32 - length) for address, length in _NOT_GLOBAL)


def find_phones(text: str) -> Iterator[Span]:
    """Yield the spans of telephone numbers: international ones of 8 to 15 digits, and North American ones."""
    for found in _PHONE.finditer(text):
        if sum(map(str.isdigit, found[0])) in _PHONE_DIGITS:
            yield found.span()
