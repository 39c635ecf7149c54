"""Which charset decodes a page: byte order mark, HTTP header, meta element and content, each believed only if it fits.

Reads bytes and what the header claims, gives the name of a Python codec. A claim fits when almost nothing of the page
has to be replaced; a page that is UTF-8 throughout and says something else is UTF-8, because that does not happen by
accident.
"""

import codecs
import re

import numpy as np
from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5

FALLBACK = "cp1252"

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_META_BYTES = 4_096  # browsers look at the first 1,024; real pages put scripts before their meta elements
_META = re.compile(rb"""<meta[^>]{0,512}?charset\s*=\s*["']?\s*([A-Za-z0-9_:.\-]{2,40})""", re.IGNORECASE)
_SAMPLE_BYTES = 65_536

# What pages mean when they name a subset: the superset that browsers and the vendors use.
_SUPERSETS = {"shift_jis": "cp932", "gbk": "gb18030", "euc_kr": "cp949", "big5": "big5hkscs", "iso8859-11": "cp874"}
_UNKNOWN_TO_HTML5 = {"x-mac-cyrillic": "mac_cyrillic", "hz-gb-2312": "hz", "utf-32": "utf-32"}
_EAST_ASIAN = frozenset({"cp932", "gb18030", "cp949", "big5hkscs", "euc_jp"})
_ESCAPED = frozenset({"iso2022_jp", "hz"})  # ASCII bytes only, so that they also pass for UTF-8
_MOST_REPLACED = 0.02  # of the bytes beyond ASCII


def detect_charset(payload: bytes, http_charset: str) -> str:
    """Name of the Python codec for a page.

    Args:
        payload: the page.
        http_charset: charset of the Content-Type header, "" when there is none.
    """
    for mark, codec in _MARKS:
        if payload.startswith(mark):
            return codec
    claims = [codec for codec in (_codec(http_charset), _codec(_meta_charset(payload))) if codec]
    wide = _wide(payload)
    if wide:
        return wide
    if claims and claims[0] in _ESCAPED and fits(payload, claims[0]):
        return claims[0]
    if _is_utf8(payload):
        return "utf-8"
    fitting = [codec for codec in dict.fromkeys(claims) if fits(payload, codec)]
    guess = _codec(detect_encoding(payload[:_SAMPLE_BYTES]) or "")
    return _choose(payload, fitting, guess)


def fits(payload: bytes, codec: str) -> bool:
    """Whether the codec decodes the page, but for a few damaged bytes."""
    replaced = payload.decode(codec, "replace").count("�") - payload.count("�".encode())
    beyond_ascii = int(np.count_nonzero(np.frombuffer(payload, np.uint8) >= 128))
    return replaced <= beyond_ascii * _MOST_REPLACED


def _choose(payload: bytes, fitting: list[str], guess: str) -> str:
    """One codec from the claims that fit and what the content looks like.

    Western single-byte charsets fit anything and are what servers claim by default, so the content overrules them when
    it reads as an East Asian charset; between two claims that fit, the content decides.
    """
    if guess in _EAST_ASIAN and all(codec == FALLBACK for codec in fitting) and fits(payload, guess):
        return guess
    if guess in fitting:
        return guess
    if fitting:
        return fitting[0]
    return guess if guess and fits(payload, guess) else FALLBACK


def _meta_charset(payload: bytes) -> str:
    match = _META.search(payload, 0, _META_BYTES)
    return match.group(1).decode("ascii") if match else ""


def _codec(label: str) -> str:
    """The Python codec for a label of the web, "" for one nobody knows."""
    label = label.strip(" \t\"';").lower()
    if not label:
        return ""
    known = map_encoding_to_html5(label, False) or _UNKNOWN_TO_HTML5.get(label, "")
    return _SUPERSETS.get(known, known)


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        return fits(payload, "utf-8")
    return True


def _wide(payload: bytes) -> str:
    """UTF-16 without a mark shows in the zeros of its markup, nearly all of them at even or at odd places."""
    start = np.frombuffer(payload[:1024], np.uint8)
    even, odd = np.count_nonzero(start[::2] == 0), np.count_nonzero(start[1::2] == 0)
    if (even + odd) * 10 < len(start) or min(even, odd) * 10 > max(even, odd):
        return ""
    return "utf-16-be" if even > odd else "utf-16-le"


def decode_text(content: bytes, charset: str) -> str:
    """Text that is UTF-8 by its format, or in the charset that its header names, or in what it looks like."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode(detect_charset(content, charset), "replace")
