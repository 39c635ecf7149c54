"""Find public IPv6 addresses in a text (RFC 4291): groups of hexadecimal digits, `::` once, IPv4 at the end.

Invariants:
- Time is linear in the text: a candidate has at most 45 characters.
"""

import re
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv6Address

# Public addresses begin with 2 or 3, or are IPv4 after the NAT64 prefix (RFC 6052); times and MAC addresses do not.
_CANDIDATE = re.compile(
    r"(?<![\w:.])(?:[23][0-9A-Fa-f]{3}|0{0,2}64:[fF][fF]9[bB]):[0-9A-Fa-f:]{1,35}(?:(?:\.[0-9]{1,3}){3})?(?![\w])"
)
# IANA's registry of special IPv6 addresses that are not global and begin with 2 or 3.
_NOT_GLOBAL = tuple(
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
    return not any(value >> shift == prefix for prefix, shift in _NOT_GLOBAL)
