"""Whether the content of a page speaks strongly enough against the charset that the page declares.

Reads the words of a page that have bytes beyond ASCII (`likelihood.words_beyond_ascii`). Invariants:
- A language that the table of pairs was not counted on is unlikely in every charset, so that one which is somewhat less
  unlikely proves nothing: the other charset must read like text in itself.
- Beside that, it must give the letters of one language where the declared one does not, or be better by very much.
"""

from data_pipeline.readers.alphabet import count_letters, is_latin, is_one_alphabet
from data_pipeline.readers.charset_likelihood import WIDE, compute_mean_likelihood

_MIN_CHARACTERS = 4  # beyond ASCII: fewer prove nothing
_MIN_LETTERS = 3  # different ones
_MIN_GAIN = 12.0  # natural logarithms, over the whole sample
_MIN_LIKELIHOOD = -8.0  # mean of a pair of characters that reads like text
_MIN_WIDE_LIKELIHOOD = -9.0  # the same of a Chinese, Japanese or Korean character
_MIN_WIDE_SHARE = 0.5  # of the bytes of these words that are beyond ASCII
_MIN_CLEAR_GAIN = 4.0  # mean, from which letters of one language are not asked for
_SHARE = 0.96  # of the letters that are of one language; the rest are foreign names
_FOREIGN_SHARE = 0.85  # the same where the declared charset gives another script
_MAX_EVIDENCE = 120


def is_strong_evidence(words: bytes, found: str, declared: str) -> bool:
    """Return whether the words show that a page is in `found` and not, as it declares, in `declared`.

    Both are names of Python codecs.
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
    # A table of Cyrillic or Greek gives letters of one language for any bytes.
    is_western = is_latin(declared_letters)
    share = _SHARE if is_western else _FOREIGN_SHARE
    if likelihood < _MIN_LIKELIHOOD or letters.total() < _MIN_CHARACTERS or not is_one_alphabet(letters, share):
        return False
    if not is_western:
        return True
    return len(letters) >= _MIN_LETTERS and (gain >= _MIN_CLEAR_GAIN or not is_one_alphabet(declared_letters, _SHARE))
