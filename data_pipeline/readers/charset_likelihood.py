"""Decide whether the content of a page is strong evidence against the charset that the page
declares.

`_ALPHABETS` lists the non-ASCII letters of languages that were written in single-byte charsets. A
wrong charset rarely yields letters of one language only: its wrong letters come from its whole
table.

A decoding is scored by how likely it is as human text, in any language that has charsets of its
own. The score is the mean natural logarithm of the probability of pairs of neighbouring characters
for alphabets, and of single characters for Chinese, Japanese and Korean.

Reads `pairs.tsv`: a level, then all pairs with a probability of about e^-level in some language.
The pairs were counted in sentences of 70 languages of the Leipzig Corpora Collection (CC BY), as
the Lingua project ships them. Spanish pairs were added by hand, because its sentences have next to
none.

Invariants:
- The other charset must be likely in itself. A language that the table of pairs was not counted on
  is unlikely in every charset, so that a somewhat smaller unlikelihood proves nothing.
- It must also yield the letters of one language where the declared one does not, or be better by a
  wide margin.
"""

import codecs
import re
from collections import Counter
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np

_ARABIC = "ءآأؤإئابةتثجحخدذرزسشصضطظعغفقكلمنهوىي"
# The letters of the orthography and those of usual foreign words.
_ALPHABETS = {
    "az": "çəğıöşü", "be": "абвгдежзйклмнопрстуфхцчшыьэюяёіў",
    "bg": "абвгдежзийклмнопрстуфхцчшщъьюя",
    "ca": "àèéíïòóúüçñªº", "cs": "áčďéěíňóřšťúůýžöü", "cy": "âêîôûŵŷäëïöáàé",
    "da nb nn": "æøåéèêóòôäöü",
    "de": "äöüßéèàç", "el": "άέήίόύώΐΰϊϋαβγδεζηθικλμνξοπρστυφχψως", "eo": "ĉĝĥĵŝŭ",
    "es gl": "áéíóúüñªº",
    "et": "äõöüšž", "fi sv": "äöåéàüšž", "fo": "áðíóúýæø", "fr": "àâæçéèêëîïôùûüÿœñö",
    "ga": "áéíóú",
    "gd": "àèìòùáéó", "he": "אבגדהוזחטיךכלםמןנסעףפץצקרשתװױײ", "hr bs sl": "čćđšž",
    "hu": "áéíóöőúüű",
    "is": "áðéíóúýþæö", "it": "àèéìíîòóùúªº", "lt": "ąčęėįšųūž", "lv": "āčēģīķļņōŗšūž",
    "mk": "абвгдѓежзѕијклљмнњопрстќуфхцчџшѐѝ", "mt": "ċġħżàèìòù", "nl af": "áéëèêïíîóöôúüû",
    "pl": "ąćęłńóśźż",
    "pt": "áâãàçéêíóôõúüªº", "ro": "ăâîșțşţ", "ru": "абвгдежзийклмнопрстуфхцчшщъыьэюяё",
    "se": "áčđŋšŧž",
    "sk": "áäčďéíĺľňóôŕšťúýžöü", "sq": "çë", "sr": "абвгдђежзијклљмнњопрстћуфхцчџш",
    "th": "กขฃคฅฆงจฉชซฌญฎฏฐฑฒณดตถทธนบปผฝพฟภมยรฤลฦวศษสหฬอฮฯะาำเแโใไๅๆ", "tr": "çğıöşüâîû",
    "uk": "абвгґдежзийклмнопрстуфхцчшщьюяєії", "vi": "àáâãèéêìíòóôõùúýăđĩũơưü",
    "wen": "ćčěłńóřŕśšžź",
    "ar": _ARABIC, "fa": _ARABIC + "پچژکگی", "ur": _ARABIC + "ٹپچڈڑکگںھہیے",
}  # fmt: skip
_LETTERS = tuple(frozenset(letters) for letters in _ALPHABETS.values())
_SYMBOL_IN_WORD = re.compile(r"(?<=[^\W\d_])[¹²³¼½¾¤¥£¢¦§©®¬¯±¶¸×÷€†‡‰¡¿\u2500-\u259f](?=[^\W\d_])")
# Latin and another script in one word
_SCRIPTS_MEET = re.compile(r"[a-z][\u0370-\u1fff]|[\u0370-\u1fff][a-z]")
_DOTTED = "\u0307"  # str.lower() turns the Turkish dotted I into i and this combining dot


def count_letters(text: str) -> Counter[str]:
    """Count the non-ASCII letters in lower case, and the symbols found inside words, where only
    letters belong.
    """
    lower = text.lower()
    letters = Counter(
        letter for letter in lower if letter > "\x7f" and letter.isalpha() and letter != _DOTTED
    )
    return letters + Counter(_SYMBOL_IN_WORD.findall(lower)) + Counter(_SCRIPTS_MEET.findall(lower))


def is_latin(letters: Counter[str]) -> bool:
    """Return whether most of these letters are Latin."""
    return (
        sum(count for letter, count in letters.items() if letter < "\u0370") * 2 >= letters.total()
    )


def is_one_alphabet(letters: Counter[str], min_share: float) -> bool:
    """Return whether one language has at least `min_share` of the letters; the rest are taken
    for foreign names.
    """
    needed = letters.total() * min_share
    return any(
        sum(letters[letter] for letter in letters.keys() & own) >= needed for own in _LETTERS
    )


Values = np.ndarray[Any, np.dtype[np.float64]]

# A match starts at the first non-ASCII byte. The ASCII start of the word is searched backwards,
# because a forward search takes quadratic time in long runs of ASCII. Trailing bytes of wide
# characters may be ASCII: from 0x40, or digits (GB 18030).
_WORDS = re.compile(rb"[\x80-\xff][\x30-\x39\x40-\x7e\x80-\xff]{0,200}")
_BEGIN = re.compile(rb"[\x40-\x7e]+\Z")
_LONGEST_BEGIN = 24
_SAMPLE_BYTES = 600
_FLOOR = -14.0  # a pair that no language has
_UPPER_INSIDE = -6.0  # an upper-case letter after a lower-case one
_MARKS_ONLY = -9.0  # symbols and punctuation, which every charset has
_ASCII = -5.0
_IMPOSSIBLE = -30.0  # replaced bytes and controls


def extract_non_ascii_words(payload: bytes) -> bytes:
    """Return the words of a page that have non-ASCII bytes, joined by spaces, up to about
    `_SAMPLE_BYTES` bytes.
    """
    words: list[bytes] = []
    size = 0
    for match in _WORDS.finditer(payload):
        begin = _BEGIN.search(payload[max(0, match.start() - _LONGEST_BEGIN) : match.start()])
        words.append((begin.group() if begin else b"") + match.group())
        size += len(words[-1]) + 1
        if size >= _SAMPLE_BYTES:
            break
    return b" ".join(words)


def compute_mean_likelihood(words: bytes, codec: str) -> float:
    """Return the mean log probability of a decoding; `_IMPOSSIBLE` for no words or an
    unsupported codec.
    """
    if codec not in WIDE and not _is_single_byte_codec(codec):
        return _IMPOSSIBLE
    values = _score_wide_words(words, codec) if codec in WIDE else _score_narrow_words(words, codec)
    return float(values.mean()) if len(values) else _IMPOSSIBLE


def _score_wide_words(words: bytes, codec: str) -> Values:
    text = words.decode(codec, "replace")
    return np.array(
        [_score_wide_character(character, codec) for character in text if character > "\x7f"],
        np.float64,
    )


def _score_narrow_words(words: bytes, codec: str) -> Values:
    data = np.frombuffer(b" " + words + b" ", np.uint8)
    first = data[:-1]
    second = data[1:]
    # Two ASCII bytes tell nothing about the charset.
    counts = (first | second) >= 128
    values: Values = _build_byte_pair_scores(codec)[first[counts], second[counts]]
    return values


@lru_cache(maxsize=64)
def _is_single_byte_codec(codec: str) -> bool:
    """Return whether every byte decodes to one character."""
    decoder = codecs.getincrementaldecoder(codec)("replace")
    return all(len(decoder.decode(bytes([byte]))) == 1 for byte in range(32, 256))


@lru_cache(maxsize=64)
def _build_byte_pair_scores(codec: str) -> Values:
    """Return the log probability of each pair of bytes, (256, 256) float64."""
    characters = bytes(range(256)).decode(codec, "replace")
    # The Turkish dotted I is two characters in lower case.
    lower = np.array(
        [ord(character.lower()[0].replace("\xa0", " ")) for character in characters], np.uint32
    )
    is_letter, is_lower, is_upper = (
        np.array([test(character) for character in characters], np.bool_)
        for test in (_is_letter_or_box, str.islower, str.isupper)
    )
    keys = (lower[:, None] << np.uint32(16)) | lower[None, :]
    known, levels = _load_known_pairs()
    indices = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    unknown = np.where(is_letter[:, None] | is_letter[None, :], _FLOOR, _MARKS_ONLY)
    values = np.where(known[indices] == keys, levels[indices], unknown)
    is_ascii = lower < 128
    # a non-breaking space next to ASCII
    values = np.where(is_ascii[:, None] & is_ascii[None, :], _ASCII, values)
    values += np.where(is_lower[:, None] & is_upper[None, :], _UPPER_INSIDE, 0.0)
    impossible = np.array(
        [character == "�" or "\x7f" <= character < "\xa0" for character in characters], np.bool_
    )
    values[impossible, :] = values[:, impossible] = _IMPOSSIBLE
    return values


WIDE = {
    "cp932": "cp932",
    "euc_jp": "euc_jp",
    "gb18030": "gb2312",
    "big5hkscs": "big5",
    "cp949": "euc_kr",
    "johab": "euc_kr",
}


@lru_cache(maxsize=1 << 15)
def _score_wide_character(character: str, codec: str) -> float:
    """Return the log probability of a character of a multi-byte charset; its first standard
    lists the common ones.
    """
    if character < "\x80":
        return -6.0
    if character == "�" or character < "\xa0" or "\ue000" <= character < "\uf900":
        return _IMPOSSIBLE
    if "\u3000" <= character < "\u3020" or "\uff00" <= character < "\uff60":
        return -6.0
    if "\u3040" <= character < "\u3100":
        return -5.0 if codec in ("cp932", "euc_jp") else -13.0
    if "\uff61" <= character <= "\uff9f":
        return -12.0  # half-width kana: any bytes look like them
    try:
        lead = character.encode(WIDE[codec])
    except UnicodeEncodeError:
        return -9.0 if codec == "gb18030" and "\u4e00" <= character < "\ua000" else -12.0
    return _score_listed_character(codec, lead)


def _score_listed_character(codec: str, code: bytes) -> float:
    # Lead bytes of the common characters: level 1 of GB 2312 and JIS X 0208, the frequent ones of
    # Big5, hangul.
    first = code[0]
    if codec == "gb18030":
        return -7.0 if 0xB0 <= first <= 0xD7 else -11.0
    if codec == "big5hkscs":
        return -7.0 if 0xA4 <= first <= 0xC6 else -11.0
    if codec in ("cp949", "johab"):
        return -6.0 if 0xB0 <= first <= 0xC8 else -12.0
    if codec == "euc_jp":
        return -7.5 if 0xB0 <= first <= 0xCF else -11.5
    return -7.5 if 0x88 <= first <= 0x97 else -11.5


def _is_letter_or_box(character: str) -> bool:
    """Return whether a character occurs next to others like it; where one charset draws boxes,
    others have letters.
    """
    return character.isalpha() or "\u2500" <= character < "\u2600"


@lru_cache(maxsize=1)
def _load_known_pairs() -> tuple[np.ndarray[Any, np.dtype[np.uint32]], Values]:
    """Return the sorted keys of the known pairs (first character in the upper 16 bits) and their
    levels.
    """
    table: dict[int, float] = {}
    content = resources.files(__package__).joinpath("pairs.tsv").read_text(encoding="utf-8")
    for line in content.split("\n"):
        level, _, pairs = line.partition("\t")
        for first, second in zip(pairs[::2], pairs[1::2], strict=True):
            table[ord(first) << 16 | ord(second)] = -float(level)
    keys = np.array(sorted(table), np.uint32)
    return keys, np.array([table[key] for key in keys.tolist()], np.float64)


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
    letters = count_letters(text)
    declared_letters = count_letters(words.decode(declared, "replace"))
    # A Cyrillic or Greek table yields letters of one language for any bytes.
    is_western = is_latin(declared_letters)
    share = _SHARE if is_western else _FOREIGN_SHARE
    if (
        likelihood < _MIN_LIKELIHOOD
        or letters.total() < _MIN_CHARACTERS
        or not is_one_alphabet(letters, share)
    ):
        return False
    if not is_western:
        return True
    return len(letters) >= _MIN_LETTERS and (
        gain >= _MIN_CLEAR_GAIN or not is_one_alphabet(declared_letters, _SHARE)
    )
