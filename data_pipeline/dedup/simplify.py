"""Text made simpler before it is compared, so that case, numbers, punctuation and accents hide no duplicate.

Reads text, gives text; equal to datatrove's `simplify_text` with its defaults (lower case, numbers, punctuation, white
space, diacritics, in this order).
"""

import re
import unicodedata

from data_pipeline.rules.characters import PUNCTUATION, TERMINAL_MARKS

NUMBER = re.compile(r"\d+(?:[.,،٫⎖⎗⎘]\d+)?")
WHITE_SPACE = re.compile(r"\s+")

# The marks that end sentences in other scripts stay here, although the rules count them as punctuation.
_REMOVED = (PUNCTUATION - TERMINAL_MARKS) | set(".?!。．？！")
_TO_SPACE = str.maketrans(dict.fromkeys(_REMOVED, " "))


def simplify(text: str) -> str:
    """Return the text in lower case, numbers as 0, punctuation as spaces, white space folded, without accents."""
    text = NUMBER.sub("0", text.lower()).translate(_TO_SPACE)
    text = WHITE_SPACE.sub(" ", text.strip())
    if text.isascii():
        return text.strip()
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(character for character in decomposed if unicodedata.category(character) != "Mn").strip()
