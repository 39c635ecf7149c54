"""Charsets that show in the bytes of a page without weighing them: by their mark, by zeros, by escapes, by ASCII alone.

Reads bytes, gives the name of a Python codec, or "" where the bytes beyond ASCII have to be weighed.
"""

import codecs
import re

import numpy as np

from data_pipeline.readers.likelihood import compute_mean_likelihood

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
