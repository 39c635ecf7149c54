"""Which charset decodes a page: byte order mark, HTTP header, meta element and content, each believed only if it fits.

Reads bytes and what the header claims, gives the name of a Python codec. A claim fits when almost nothing of the page
has to be replaced; a page that is UTF-8 throughout and says something else is UTF-8, because that does not happen by
accident. A declared charset that decodes the page without an error is overruled only on strong evidence
(`charset_evidence`), and that is noted.

Charsets that show in the bytes of a page without weighing them: by their mark, by zeros, by escapes, by ASCII alone.

Reads bytes, gives the name of a Python codec, or "" where the bytes beyond ASCII have to be weighed.
"""

import codecs
import re
from dataclasses import dataclass

import numpy as np
from resiliparse.parse.encoding import map_encoding_to_html5

from data_pipeline.readers.charset_evidence import is_strong_evidence
from data_pipeline.readers.charset_likelihood import WIDE, compute_mean_likelihood, extract_non_ascii_words

FALLBACK = "cp1252"

_META_BYTES = 4_096  # browsers look at the first 1,024; real pages put scripts before their meta elements
_META = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,512}?(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_:.\-]{2,40})""", re.IGNORECASE
)

# What pages mean when they name a subset: the superset that browsers and the vendors use.
_SUPERSETS = {
    "shift_jis": "cp932",
    "gbk": "gb18030",
    "gb2312": "gb18030",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "ascii": "",
    "us-ascii": "",
}
_ALIASES = {
    "x-mac-cyrillic": "mac_cyrillic",
    "mac-cyrillic": "mac_cyrillic",
    "macintosh": "mac_roman",
    "hz-gb-2312": "hz",
}
_NARROW = (
    *("cp1250", "cp1251", "cp1252", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874", "cp866"),
    *("iso8859-2", "iso8859-3", "iso8859-4", "iso8859-5", "iso8859-6", "iso8859-7", "iso8859-8", "iso8859-10"),
    *("iso8859-13", "iso8859-15", "iso8859-16", "koi8-r", "koi8-u", "mac_cyrillic", "mac_roman", "cp850"),
)
# What a page may claim: charsets of text, of all the codecs of Python. The last ones are only ever claimed.
_CLAIMABLE = frozenset(
    codecs.lookup(name).name
    for name in (
        *_NARROW,
        *WIDE,
        *("utf-8", "utf-16-le", "utf-16-be", "utf-16", "utf-32", "hz", "iso2022_jp", "iso2022_kr"),
        *("iso8859-14", "cp437", "cp852", "cp855", "cp862", "koi8-t", "kz1048", "mac_latin2", "mac_greek"),
    )
)
_MOST_REPLACED = 0.02  # of the bytes beyond ASCII
# How much a claim weighs against what the content looks like, in natural logarithms; the content weighs more the more
# there is of it, up to so many bytes. Western charsets are what servers say who say nothing.
_CLAIM = {
    "meta": 9.0,
    "header": 7.0,
    "default": 6.0,
    "wide": 30.0,
    "usual": 3.0,
    "rare": -9.0,
    "rarest": -25.0,
    "alphabet": 30.0,
}
_USUAL = (FALLBACK, "cp1251", "gb18030", "cp932", "big5hkscs", "cp949")
_RARE = ("iso8859-13", "iso8859-15", "mac_roman", "cp1258")
_RAREST = ("iso8859-3", "iso8859-4", "iso8859-10", "iso8859-16", "cp850", "johab")
_MOST_EVIDENCE = 120
_NEVER = -1e9
_MAX_DAMAGED = 100
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")  # what no charset has on purpose; \x85 ends lines
_HUNGARIAN_CODECS = ("cp1250", "iso8859-2")
_HUNGARIAN = frozenset("áéíóöőúüűÁÉÍÓÖŐÚÜŰ".encode("cp1250"))
_HUNGARIAN_ALL = [group.encode("cp1250") for group in ("áÁéÉ", "őŐűŰ", "öÖüÜ")]  # some of each


@dataclass(frozen=True, slots=True)
class FoundCharset:
    """The Python codec that decodes a page, and a note when that overrules a charset that could decode it, too."""

    codec: str
    note: str = ""


def detect_charset(payload: bytes, http_charset: str) -> str:
    """Name of the Python codec for a page.

    Args:
        payload: the page.
        http_charset: charset of the Content-Type header, "" when there is none.
    """
    return decide_charset(payload, http_charset).codec


def decide_charset(payload: bytes, http_charset: str) -> FoundCharset:
    """Return the codec of a page, and what it overrules; the arguments are those of `detect_charset`."""
    header, meta = _resolve_codec(http_charset), _resolve_codec(_find_meta_charset(payload))
    shown = detect_marked_charset(payload) or ("utf-8" if _is_utf8(payload) else "")
    codec = shown or _guess_codec(payload, header, meta)
    for source, label, declared in (("header", http_charset, header), ("meta element", "", meta)):
        if declared and not payload.isascii() and _overrules(payload, codec, declared):
            said = f" {label.strip().lower()[:40]}" if label else f" {declared}"
            return FoundCharset(codec, f"charset{said} of the {source} overruled: {codec}")
    return FoundCharset(codec)


def _overrules(payload: bytes, codec: str, declared: str) -> bool:
    """Return whether a declared charset could decode a page, and to something else."""
    if codec == declared or not decodes(payload, declared):
        return False
    return payload.decode(codec, "replace") != payload.decode(declared, "replace")


def _guess_codec(payload: bytes, header: str, meta: str) -> str:
    """Return the likeliest codec: a declared one that decodes the page, unless the content is strongly against it."""
    words = extract_non_ascii_words(payload)
    scores = _score(payload, words, header, meta)
    best = max(scores, key=lambda codec: (scores[codec], codec == FALLBACK))
    declared = [codec for codec in (header, meta) if codec and codec != best and decodes(payload, codec)]
    if declared and best not in (header, meta):
        likelier = max(declared, key=lambda codec: scores.get(codec, _NEVER))
        is_known = _is_hungarian(words) and best in _HUNGARIAN_CODECS
        if not is_known and not is_strong_evidence(words, best, likelier):
            return likelier
    if can_decode(payload, best):
        return best
    return next((codec for codec in (meta, header) if codec and can_decode(payload, codec)), best)


def _score(payload: bytes, words: bytes, header: str, meta: str) -> dict[str, float]:
    """Return how likely each codec is, as what the content looks like and what header and meta element say."""
    evidence = min(len(words) - words.count(b" "), _MOST_EVIDENCE)
    weights: dict[str, float] = dict.fromkeys((*_NARROW, *WIDE), 0.0)
    for codec, kind in ((meta, "meta"), (header, "header")):
        if codec not in ("", "utf-8", "hz", "iso2022_jp"):
            weights[codec] = weights.get(codec, 0.0) + _CLAIM["default" if codec == FALLBACK else kind]
            weights[codec] += _CLAIM["wide"] if codec in WIDE and can_decode(payload, codec) else 0.0
    for kind, members in (("usual", _USUAL), ("rare", _RARE), ("rarest", _RAREST)):
        for codec in members:
            if kind == "usual" or codec not in (meta, header):  # nobody names a rare one by mistake
                weights[codec] += _CLAIM[kind]
    if _is_hungarian(words):
        for codec in _HUNGARIAN_CODECS:
            weights[codec] += _CLAIM["alphabet"]
    return {codec: weight + evidence * compute_mean_likelihood(words, codec) for codec, weight in weights.items()}


def _is_hungarian(words: bytes) -> bool:
    """Whether the letters beyond ASCII are Hungarian's, with the two that Western Europe reads as õ and û.

    Pairs cannot tell: õ is common in Estonian and Portuguese, û in French, and none of them has these letters alone.
    """
    letters = [byte for byte in words if byte >= 0xC0]
    others = sum(byte not in _HUNGARIAN for byte in letters)
    return others * 50 <= len(letters) and all(any(byte in group for byte in letters) for group in _HUNGARIAN_ALL)


def decodes(payload: bytes, codec: str) -> bool:
    """Return whether a codec decodes a page without an error: no byte replaced, and none a control character.

    One damaged byte in `_MAX_DAMAGED` bytes beyond ASCII counts for nothing.
    """
    text = payload.decode(codec, "replace")
    damaged = text.count("\ufffd") - payload.count("\ufffd".encode()) + len(_CONTROLS.findall(text))
    beyond_ascii = int(np.count_nonzero(np.frombuffer(payload, np.uint8) >= 128))
    return damaged * _MAX_DAMAGED <= beyond_ascii


def can_decode(payload: bytes, codec: str) -> bool:
    """Whether the codec decodes the page, but for a few damaged bytes."""
    replaced = payload.decode(codec, "replace").count("�") - payload.count("�".encode())
    beyond_ascii = int(np.count_nonzero(np.frombuffer(payload, np.uint8) >= 128))
    return replaced <= beyond_ascii * _MOST_REPLACED


def _find_meta_charset(payload: bytes) -> str:
    match = _META.search(payload, 0, _META_BYTES)
    return match.group(1).decode("ascii") if match else ""


def _resolve_codec(label: str) -> str:
    """The Python codec for a label of the web, "" for one nobody knows."""
    label = label.strip(" \t\"';").lower()
    if not label:
        return ""
    try:
        known = _ALIASES.get(label) or map_encoding_to_html5(label, False) or label
        known = _SUPERSETS.get(known, known)
        name = codecs.lookup(known).name if known else ""
    except (LookupError, ValueError):  # the latter for NULs and lone surrogates
        return ""
    return known if name in _CLAIMABLE else ""


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        return can_decode(payload, "utf-8")
    return True


def decode_text(content: bytes, charset: str) -> str:
    """Text that is UTF-8 by its format, or in the charset that its header names, or in what it looks like."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode(detect_charset(content, charset), "replace")


_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_SAMPLE_BYTES = 65_536
_SIGNS = np.frombuffer(b" \n\r\t<>/=\"'.,:;-", np.uint8)
_ESCAPES = ((b"\x1b$B", "iso2022_jp"), (b"\x1b$@", "iso2022_jp"), (b"\x1b(J", "iso2022_jp"), (b"\x1b$)C", "iso2022_kr"))


def detect_marked_charset(payload: bytes) -> str:
    """Name of the codec that nothing else in the page can change."""
    for mark, codec in _MARKS:
        if payload.startswith(mark):
            return codec
    if b"\0" in payload[:_SAMPLE_BYTES] and (wide := _detect_wide_charset(payload)):
        return wide
    return _detect_escaped_charset(payload) if payload.isascii() else ""


def _detect_escaped_charset(payload: bytes) -> str:
    """Bytes of ASCII alone: charsets that switch by escapes, or nothing to decide."""
    for escape, codec in _ESCAPES if b"\x1b" in payload else ():
        if escape in payload and _can_decode_strictly(payload, codec):
            return codec
    if b"~{" in payload and b"~}" in payload and _can_decode_strictly(payload, "hz") and _is_chinese_hz(payload):
        return "hz"
    return "utf-8"


def _is_chinese_hz(payload: bytes) -> bool:
    """Whether what HZ decodes to is common Chinese, and not a page about tildes and braces."""
    found = re.findall(rb"~\{((?:[!-~]{2})+?)~\}", payload[:_SAMPLE_BYTES])
    words = b"".join(bytes(byte | 0x80 for byte in word) for word in found)
    return bool(words) and compute_mean_likelihood(words, "gb18030") > -9.0


def _can_decode_strictly(payload: bytes, codec: str) -> bool:
    """Whether the codec decodes the page without an error."""
    try:
        payload.decode(codec)
    except (UnicodeDecodeError, ValueError):
        return False
    return True


def _detect_wide_charset(payload: bytes) -> str:
    """UTF-16 or UTF-32 without a mark, which shows in what is zero of four bytes, or of two beside signs of markup."""
    start = np.frombuffer(payload[: min(_SAMPLE_BYTES, len(payload)) & ~3], np.uint8).reshape(-1, 4)
    zeros = np.count_nonzero(start == 0, axis=0) * 10
    for codec, upper, lower in (("utf-32-le", 3, 2), ("utf-32-be", 0, 1)):
        if min(zeros[upper], zeros[lower]) >= 9 * len(start) > 0:
            return codec
    units = start.reshape(-1, 2)
    signs = np.isin(units, _SIGNS)
    little = np.count_nonzero(signs[:, 0] & (units[:, 1] == 0))
    big = np.count_nonzero(signs[:, 1] & (units[:, 0] == 0))
    if max(little, big) * 200 < len(units) or min(little, big) * 10 > max(little, big):
        return ""
    codec = "utf-16-be" if big > little else "utf-16-le"
    return codec if payload.decode(codec, "replace").count("\ufffd") * 100 <= len(units) else ""
