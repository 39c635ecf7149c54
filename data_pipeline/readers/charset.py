"""Detect the charset of a page from its byte order mark, HTTP header, meta element and content.

Invariants:
- A declared charset is accepted only if almost nothing of the page has to be replaced.
- A page that is valid UTF-8 throughout is UTF-8, whatever it declares: other charsets do not
  produce that by accident.
- A declared charset that decodes the page without an error is overruled only on strong evidence
  (`charset_likelihood`), and the page gets a note.
"""

import codecs
import re
from dataclasses import dataclass

import numpy as np
from resiliparse.parse.encoding import map_encoding_to_html5

from llmsys.data_pipeline.readers.charset_likelihood import (
    WIDE,
    compute_mean_likelihood,
    extract_non_ascii_words,
    is_strong_evidence,
)

FALLBACK = "cp1252"

# browsers look at the first 1,024; real pages put scripts before their meta elements
_META_BYTES = 4_096
_META = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,512}?(?:charset|encoding)\s*=\s*["']?\s*([A-Za-z0-9_:.\-]{2,40})""",
    re.IGNORECASE,
)

# Pages that name a subset use the superset: browsers decode it so (WHATWG Encoding).
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
    *(
        "cp1250",
        "cp1251",
        "cp1252",
        "cp1253",
        "cp1254",
        "cp1255",
        "cp1256",
        "cp1257",
        "cp1258",
        "cp874",
        "cp866",
    ),
    *(
        "iso8859-2",
        "iso8859-3",
        "iso8859-4",
        "iso8859-5",
        "iso8859-6",
        "iso8859-7",
        "iso8859-8",
        "iso8859-10",
    ),
    *(
        "iso8859-13",
        "iso8859-15",
        "iso8859-16",
        "koi8-r",
        "koi8-u",
        "mac_cyrillic",
        "mac_roman",
        "cp850",
    ),
)
# Python codecs that a page may declare. Those of the last line are never guessed.
_CLAIMABLE = frozenset(
    codecs.lookup(name).name
    for name in (
        *_NARROW,
        *WIDE,
        *("utf-8", "utf-16-le", "utf-16-be", "utf-16", "utf-32", "hz", "iso2022_jp", "iso2022_kr"),
        *(
            "iso8859-14",
            "cp437",
            "cp852",
            "cp855",
            "cp862",
            "koi8-t",
            "kz1048",
            "mac_latin2",
            "mac_greek",
        ),
    )
)
_MAX_REPLACED = 0.02  # of the non-ASCII bytes
# Weights of the declarations against the likelihood of the content, in natural logarithms. The
# content weighs more the longer it is, up to _MAX_EVIDENCE bytes. "default": servers declare
# Western charsets that nobody configured.
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
_MAX_EVIDENCE = 120
_NEVER = -1e9
_MAX_DAMAGED = 100
# C1 controls, never intended in a page; \x85 ends lines
_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")
_HUNGARIAN_CODECS = ("cp1250", "iso8859-2")
_HUNGARIAN = frozenset("áéíóöőúüűÁÉÍÓÖŐÚÜŰ".encode("cp1250"))
_HUNGARIAN_ALL = [
    group.encode("cp1250") for group in ("áÁéÉ", "őŐűŰ", "öÖüÜ")
]  # a Hungarian page has some of each group


@dataclass(frozen=True, slots=True)
class FoundCharset:
    """The Python codec that decodes a page, and a note if it overrules a declared charset that
    fits too.
    """

    codec: str
    note: str = ""


def detect_charset(payload: bytes, http_charset: str) -> str:
    """Return the name of the Python codec for a page.

    Args:
        payload: bytes of the page.
        http_charset: charset of the Content-Type header, "" if there is none.

    Returns:
        A name that `bytes.decode` accepts.
    """
    return decide_charset(payload, http_charset).codec


def decide_charset(payload: bytes, http_charset: str) -> FoundCharset:
    """Decide the charset of a page.

    Args:
        payload: The page.
        http_charset: Charset of its header; "" without one.

    Returns:
        The codec, with a note on the charset it overrules.
    """
    header = _resolve_codec(http_charset)
    meta = _resolve_codec(_find_meta_charset(payload))
    shown = detect_marked_charset(payload) or ("utf-8" if _is_utf8(payload) else "")
    codec = shown or _guess_codec(payload, header, meta)
    for source, label, declared in (("header", http_charset, header), ("meta element", "", meta)):
        if declared and not payload.isascii() and _is_overruled(payload, codec, declared):
            name = label.strip().lower()[:40] if label else declared
            return FoundCharset(codec, f"charset {name} of the {source} overruled: {codec}")
    return FoundCharset(codec)


def _is_overruled(payload: bytes, codec: str, declared: str) -> bool:
    """Return whether a declared charset decodes the page cleanly to a text other than the one of
    `codec`.
    """
    if codec == declared or not can_decode_cleanly(payload, declared):
        return False
    return payload.decode(codec, "replace") != payload.decode(declared, "replace")


def _guess_codec(payload: bytes, header: str, meta: str) -> str:
    """Return the likeliest codec; a declared one that decodes the page yields only to strong
    evidence.
    """
    words = extract_non_ascii_words(payload)
    scores = _score(payload, words, header, meta)
    best = max(scores, key=lambda codec: (scores[codec], codec == FALLBACK))
    declared = [
        codec
        for codec in (header, meta)
        if codec and codec != best and can_decode_cleanly(payload, codec)
    ]
    if declared and best not in (header, meta):
        likelier = max(declared, key=lambda codec: scores.get(codec, _NEVER))
        is_known = _is_hungarian(words) and best in _HUNGARIAN_CODECS
        if not is_known and not is_strong_evidence(words, best, likelier):
            return likelier
    if can_decode(payload, best):
        return best
    return next((codec for codec in (meta, header) if codec and can_decode(payload, codec)), best)


def _score(payload: bytes, words: bytes, header: str, meta: str) -> dict[str, float]:
    """Return the log score of each codec: the likelihood of the content plus the weight of
    header and meta element.
    """
    evidence = min(len(words) - words.count(b" "), _MAX_EVIDENCE)
    weights: dict[str, float] = dict.fromkeys((*_NARROW, *WIDE), 0.0)
    for codec, kind in ((meta, "meta"), (header, "header")):
        if codec not in ("", "utf-8", "hz", "iso2022_jp"):
            weights[codec] = (
                weights.get(codec, 0.0) + _CLAIM["default" if codec == FALLBACK else kind]
            )
            weights[codec] += (
                _CLAIM["wide"] if codec in WIDE and can_decode(payload, codec) else 0.0
            )
    for kind, members in (("usual", _USUAL), ("rare", _RARE), ("rarest", _RAREST)):
        for codec in members:
            # nobody declares a rare one by mistake
            if kind == "usual" or codec not in (meta, header):
                weights[codec] += _CLAIM[kind]
    if _is_hungarian(words):
        for codec in _HUNGARIAN_CODECS:
            weights[codec] += _CLAIM["alphabet"]
    return {
        codec: weight + evidence * compute_mean_likelihood(words, codec)
        for codec, weight in weights.items()
    }


def _is_hungarian(words: bytes) -> bool:
    """Return whether the non-ASCII letters are Hungarian, with the two that Western charsets read
    as õ and û.

    Pairs of letters cannot decide: õ is common in Estonian and Portuguese, û in French. No other
    language has all of these letters and only these.
    """
    letters = [byte for byte in words if byte >= 0xC0]
    others = sum(byte not in _HUNGARIAN for byte in letters)
    return others * 50 <= len(letters) and all(
        any(byte in group for byte in letters) for group in _HUNGARIAN_ALL
    )


def can_decode_cleanly(payload: bytes, codec: str) -> bool:
    """Return whether a codec decodes a page without replaced bytes and without control characters.

    Args:
        payload: The page.
        codec: Name of a Python codec.

    Returns:
        True also where one damaged byte in `_MAX_DAMAGED` non-ASCII bytes is replaced.
    """
    text = payload.decode(codec, "replace")
    damaged = text.count("\ufffd") - payload.count("\ufffd".encode()) + len(_CONTROLS.findall(text))
    beyond_ascii = int(np.count_nonzero(np.frombuffer(payload, np.uint8) >= 128))
    return damaged * _MAX_DAMAGED <= beyond_ascii


def can_decode(payload: bytes, codec: str) -> bool:
    """Return whether a codec decodes a page with at most `_MAX_REPLACED` of the non-ASCII bytes
    replaced.
    """
    replaced = payload.decode(codec, "replace").count("�") - payload.count("�".encode())
    beyond_ascii = int(np.count_nonzero(np.frombuffer(payload, np.uint8) >= 128))
    return replaced <= beyond_ascii * _MAX_REPLACED


def _find_meta_charset(payload: bytes) -> str:
    match = _META.search(payload, 0, _META_BYTES)
    return match.group(1).decode("ascii") if match else ""


def _resolve_codec(label: str) -> str:
    """Return the Python codec for a charset label of the web, "" for an unknown label."""
    label = label.strip(" \t\"';").lower()
    if not label:
        return ""
    try:
        known = _ALIASES.get(label) or map_encoding_to_html5(label, False) or label
        known = _SUPERSETS.get(known, known)
        name = codecs.lookup(known).name if known else ""
    except (LookupError, ValueError):  # ValueError: NULs and lone surrogates in the label
        return ""
    return known if name in _CLAIMABLE else ""


def _is_utf8(payload: bytes) -> bool:
    try:
        payload.decode("utf-8")
    except UnicodeDecodeError:
        return can_decode(payload, "utf-8")
    return True


def decode_text(content: bytes, charset: str) -> str:
    """Decode the bytes of a text file.

    Args:
        content: The bytes.
        charset: Charset of the header; "" without one.

    Returns:
        Decoded as UTF-8 if they are valid, else in the charset of the header, else in the
        detected one.
    """
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
_ESCAPES = (
    (b"\x1b$B", "iso2022_jp"),
    (b"\x1b$@", "iso2022_jp"),
    (b"\x1b(J", "iso2022_jp"),
    (b"\x1b$)C", "iso2022_kr"),
)


def detect_marked_charset(payload: bytes) -> str:
    """Return the codec that shows without scoring the content: a byte order mark, zero bytes,
    escapes, or ASCII only.

    Returns:
        A Python codec; "" if the non-ASCII bytes have to be scored.
    """
    for mark, codec in _MARKS:
        if payload.startswith(mark):
            return codec
    if b"\0" in payload[:_SAMPLE_BYTES] and (wide := _detect_wide_charset(payload)):
        return wide
    return _detect_escaped_charset(payload) if payload.isascii() else ""


def _detect_escaped_charset(payload: bytes) -> str:
    """Return the codec of an ASCII-only page: one that switches charsets by escapes, otherwise
    UTF-8.
    """
    for escape, codec in _ESCAPES if b"\x1b" in payload else ():
        if escape in payload and _can_decode_strictly(payload, codec):
            return codec
    if (
        b"~{" in payload
        and b"~}" in payload
        and _can_decode_strictly(payload, "hz")
        and _is_chinese_hz(payload)
    ):
        return "hz"
    return "utf-8"


def _is_chinese_hz(payload: bytes) -> bool:
    """Return whether the HZ sequences decode to common Chinese: a page about `~{` and `~}` would
    not.
    """
    found = re.findall(rb"~\{((?:[!-~]{2})+?)~\}", payload[:_SAMPLE_BYTES])
    words = b"".join(bytes(byte | 0x80 for byte in word) for word in found)
    return bool(words) and compute_mean_likelihood(words, "gb18030") > -9.0


def _can_decode_strictly(payload: bytes, codec: str) -> bool:
    """Return whether the codec decodes the page without any error."""
    try:
        payload.decode(codec)
    except (UnicodeDecodeError, ValueError):
        return False
    return True


def _detect_wide_charset(payload: bytes) -> str:
    """Return UTF-16 or UTF-32 without a byte order mark, "" if the page is neither.

    UTF-32 has zeros in the same bytes of every four. UTF-16 has them next to ASCII punctuation and
    markup.
    """
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
