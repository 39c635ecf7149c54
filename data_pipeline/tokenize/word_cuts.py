"""Where a word of a tokenizer.json ends whatever comes next, for GPT-2's way to divide texts, its heirs', and BERT's.

Reads bytes of UTF-8 and the tokenizer; gives the places of cuts. In the expressions of GPT-2 and its heirs a letter
ends a word when no letter follows, and a digit when no digit does; a line's end ends one when text follows. BERT sets
punctuation and Chinese characters apart. A cut is in front of ASCII or a letter, which compose with no punctuation or
white space before them. Which characters are letters to the library it is asked, once for each that comes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from data_pipeline.tokenize.cuts import NEWLINE, SPACE, Bytes, Flags, Places, decode_code_points
from data_pipeline.tokenize.json_cuts import list_added_tokens, is_bert, is_gpt2
from llmsys.tokenizer_json import HuggingFaceTokenizer

Codes = npt.NDArray[np.uint32]

_NO, _YES = 1, 2
_CHINESE = (0x5000, 0x9000)  # a run of whole blocks of what BERT sets apart
# The characters that NFC turns into ASCII: with them an added token could stand in a text without its own characters.
_BECOME_ASCII = ("\u037e".encode(), "\u1fef".encode(), "\u212a".encode())

_ASCII = np.arange(0x81)  # the last one stands for all that is beyond
_LETTER = (_ASCII | 0x20 >= 0x61) & (_ASCII | 0x20 <= 0x7A)
_DIGIT = (_ASCII >= 0x30) & (_ASCII <= 0x39)
_PUNCTUATION = (_ASCII > SPACE) & (_ASCII < 0x7F) & ~_LETTER & ~_DIGIT
_SOLID = _LETTER | _DIGIT | _PUNCTUATION
_APART = _PUNCTUATION | np.isin(_ASCII, [0x09, 0x0A, 0x0D, 0x20])  # from what stands beside it, to BERT
_NO_GLUE = _PUNCTUATION & (ord("'") != _ASCII)  # begins no 's or 've


class WordCutFinder:
    """The cuts of one tokenizer, whose values are such that it `json_words.has_plain_words`."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, values: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.bert = is_bert(values)
        self.gpt2 = not self.bert and is_gpt2(values)
        self._added = [token.encode() for token in list_added_tokens(values) if token.strip(" ")]
        self._plain = np.zeros(0x110000, np.uint8)

    def find_word_starts(self, data: Bytes, ends: Places) -> Flags:
        """Which bytes begin a word whatever stands around them. (len(data) + 1,) flags; `ends` divide the texts."""
        text = data.tobytes()
        codes = decode_code_points(text)
        places = np.flatnonzero((data & 0xC0) != 0x80)[1:]
        cuts = np.zeros(len(data) + 1, np.bool_)
        cuts[ends] = True
        left, right = np.minimum(codes[:-1], 0x80), np.minimum(codes[1:], 0x80)
        if self.bert:
            apart = (right < 0x80) & (_APART[right] | _APART[left])
            apart |= _is_chinese(codes[:-1]) & _is_chinese(codes[1:])
        else:
            apart = self._find_byte_level_cuts(self.compute_plain_mask(codes), left, right, ~cuts[places])
        cuts[places] = apart
        self._drop_cuts_in_added_tokens(text, cuts)
        return cuts

    def _find_byte_level_cuts(self, letter: Flags, left: Codes, right: Codes, inside: Flags) -> Flags:
        """Whether words end between each pair of characters; `inside` says that both are of one text."""
        letter_left, letter_right = letter[:-1], letter[1:]
        ends = (right < 0x80) & (letter_left & ~letter_right | _DIGIT[left] & ~_DIGIT[right])
        last = inside & (left == NEWLINE) & (letter_right | _SOLID[right])
        if self.gpt2:
            ends |= _NO_GLUE[left] & letter_right
            # The last white space before a text is a word of its own, so that a space can stand with its word.
            again = last[1:] & (left[:-1] == NEWLINE)
            ends[:-1] |= again
            last[1:] &= again | letter_left[:-1] | _SOLID[left[:-1]]
        together: Flags = ends | last
        return together

    def compute_plain_mask(self, codes: Codes) -> Flags:
        """Whether each character is part of one word with letters around it."""
        kinds = self._plain[codes]
        if not kinds.all():
            for code in np.unique(codes[kinds == 0]).tolist():
                self._plain[code] = _YES if self._tokenizer.is_one_word(f"a{chr(code)}a") else _NO
            kinds = self._plain[codes]
        plain: Flags = kinds == _YES
        return plain

    def _drop_cuts_in_added_tokens(self, text: bytes, cuts: Flags) -> None:
        """Take back the cuts inside of added tokens: these are looked for before a text is divided."""
        if self._added and any(character in text for character in _BECOME_ASCII):
            cuts[:] = False
        for token in self._added:
            place = text.find(token)
            while place >= 0:
                cuts[place + 1 : place + len(token)] = False
                place = text.find(token, place + 1)


def _is_chinese(codes: Codes) -> Flags:
    return (codes >= _CHINESE[0]) & (codes < _CHINESE[1])
