"""Texts in, CLD2's language of each out: Chromium's compact language detector, whose tables ship in its package.

CLD2 knows languages that py3langid lacks (Maori, Tigrinya, Tswana, Tsonga and more) and is fast, but its figures are
shares of a text and not probabilities. Control characters, which it refuses, are read as spaces.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

# What CLD2's check of its input refuses: controls other than white space, and code points that are no characters.
_REFUSED = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_PLANE_ENDS = "".join(chr((plane << 16) + end) for plane in range(1, 17) for end in (0xFFFE, 0xFFFF))
_NO_CHARACTER = re.compile(f"[{_PLANE_ENDS}]")

UNKNOWN = "und"


class Cld2Result(NamedTuple):
    """What CLD2 says about one text: code (`und` when it does not know), share of the text, and whether it is sure."""

    code: str
    share: float
    sure: bool


def detect_languages(texts: Sequence[str]) -> list[Cld2Result]:
    """CLD2's best guess for each text."""
    return [_detect_language(text) for text in texts]


def _detect_language(text: str) -> Cld2Result:
    import pycld2

    clean = _NO_CHARACTER.sub(" ", _REFUSED.sub(" ", text))
    try:
        sure, _, languages = pycld2.detect(clean.encode(), isPlainText=True, bestEffort=True)
    except pycld2.error:
        return Cld2Result(UNKNOWN, 0.0, False)
    _, code, percent, _ = languages[0]
    return Cld2Result(UNKNOWN if code == "un" else code, percent / 100, bool(sure))


def list_cld2_codes() -> frozenset[str]:
    """The codes that CLD2 may give."""
    import pycld2

    codes = dict(pycld2.LANGUAGES)
    return frozenset(codes[name] for name in pycld2.DETECTED_LANGUAGES)
