"""Identify languages with CLD2, Chromium's compact language detector, whose tables ship in its package.

CLD2 knows languages that py3langid lacks (Maori, Tigrinya, Tswana, Tsonga and more) and is fast. Its scores are shares
of a text, not probabilities. Control characters, which it rejects, are replaced by spaces.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

# Rejected by CLD2's input check: controls other than white space, and code points that are not characters.
_REJECTED = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_PLANE_ENDS = "".join(chr((plane << 16) + end) for plane in range(1, 17) for end in (0xFFFE, 0xFFFF))
_NO_CHARACTER = re.compile(f"[{_PLANE_ENDS}]")

UNKNOWN = "und"


class Cld2Result(NamedTuple):
    """CLD2's result for one text: code (`und` if unknown), share of the text in it, and whether CLD2 is sure."""

    code: str
    share: float
    sure: bool


def detect_languages(texts: Sequence[str]) -> list[Cld2Result]:
    """Return CLD2's best guess for each text."""
    return [_detect_language(text) for text in texts]


def _detect_language(text: str) -> Cld2Result:
    import pycld2

    clean = _NO_CHARACTER.sub(" ", _REJECTED.sub(" ", text))
    try:
        sure, _, languages = pycld2.detect(clean.encode(), isPlainText=True, bestEffort=True)
    except pycld2.error:
        return Cld2Result(UNKNOWN, 0.0, False)
    _, code, percent, _ = languages[0]
    return Cld2Result(UNKNOWN if code == "un" else code, percent / 100, bool(sure))


def list_cld2_codes() -> frozenset[str]:
    """Return the codes that CLD2 can return."""
    import pycld2

    codes = dict(pycld2.LANGUAGES)
    return frozenset(codes[name] for name in pycld2.DETECTED_LANGUAGES)
