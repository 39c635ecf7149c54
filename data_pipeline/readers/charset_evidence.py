"""Decide whether the content of a page is strong evidence against the charset that the page declares.

Invariants:
- The other charset must be likely in itself. A language that the table of pairs was not counted on is unlikely in every
  charset, so that a somewhat smaller unlikelihood proves nothing.
- It must also yield the letters of one language where the declared one does not, or be better by a wide margin.
"""

from data_pipeline.readers.alphabet import count_letters, is_latin, is_one_alphabet
from data_pipeline.readers.charset_likelihood import WIDE, compute_mean_likelihood

_MIN_CHARACTERS = 4  # non-ASCII characters: fewer prove nothing
_MIN_LETTERS = 3  # distinct letters
_MIN_GAIN = 12.0  # natural logarithms, over the whole sample
_MIN_LIKELIHOOD = -8.0  # mean log probability per pair of characters in real text
_MIN_WIDE_LIKELIHOOD = -9.0  # the same per Chinese, Japanese or Korean character
_MIN_WIDE_SHARE = 0.5  # of the bytes of these words that are not ASCII
_MIN_CLEAR_GAIN = 4.0  # mean gain from which the letters need not be of one language
_SHARE = 0.96  # of the letters that are of one language; the rest are foreign names
_FOREIGN_SHARE = 0.85  # the same where the declared charset gives another script
_MAX_EVIDENCE = 120


def is_strong_evidence(words: bytes, found: str, declared: str) -> bool:
    """Return whether the words show that a page is in `found` and not in `declared`.

    Args:
        words: the words with non-ASCII bytes, from `extract_non_ascii_words`.
        found: Python codec that the content suggests.
        declared: Python codec that the page declares.

    Returns:
        False where there is too little text to tell.
    """
    likelihood = compute_mean_likelihood(words, found)
    gain = likelihood - compute_mean_likelihood(words, declared)
    size = len(words) - words.count(b" ")
    if gain * min(size, _MAX_EVIDENCE) < _MIN_GAIN:
        return False
    text = words.decode(found, "replace")
    if sum(character > "\x7f" for character in text) < _MIN_CHARACTERS:
        return False
    if found in WIDE:
        num_high_bytes = sum(byte >= 128 for byte in words)
        return likelihood >= _MIN_WIDE_LIKELIHOOD and num_high_bytes >= _MIN_WIDE_SHARE * size
    letters, declared_letters = count_letters(text), count_letters(words.decode(declared, "replace"))
    # A Cyrillic or Greek table yields letters of one language for any bytes.
    is_western = is_latin(declared_letters)
    share = _SHARE if is_western else _FOREIGN_SHARE
    if likelihood < _MIN_LIKELIHOOD or letters.total() < _MIN_CHARACTERS or not is_one_alphabet(letters, share):
        return False
    if not is_western:
        return True
    return len(letters) >= _MIN_LETTERS and (gain >= _MIN_CLEAR_GAIN or not is_one_alphabet(declared_letters, _SHARE))
