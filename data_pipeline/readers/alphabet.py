"""Non-ASCII letters of the languages that were written in single-byte charsets.

A wrong charset rarely yields letters of one language only: its wrong letters come from its whole table.
"""

import re
from collections import Counter

_ARABIC = "ءآأؤإئابةتثجحخدذرزسشصضطظعغفقكلمنهوىي"
# The letters of the orthography and those of usual foreign words.
_ALPHABETS = {
    "az": "çəğıöşü", "be": "абвгдежзйклмнопрстуфхцчшыьэюяёіў", "bg": "абвгдежзийклмнопрстуфхцчшщъьюя",
    "ca": "àèéíïòóúüçñªº", "cs": "áčďéěíňóřšťúůýžöü", "cy": "âêîôûŵŷäëïöáàé", "da nb nn": "æøåéèêóòôäöü",
    "de": "äöüßéèàç", "el": "άέήίόύώΐΰϊϋαβγδεζηθικλμνξοπρστυφχψως", "eo": "ĉĝĥĵŝŭ", "es gl": "áéíóúüñªº",
    "et": "äõöüšž", "fi sv": "äöåéàüšž", "fo": "áðíóúýæø", "fr": "àâæçéèêëîïôùûüÿœñö", "ga": "áéíóú",
    "gd": "àèìòùáéó", "he": "אבגדהוזחטיךכלםמןנסעףפץצקרשתװױײ", "hr bs sl": "čćđšž", "hu": "áéíóöőúüű",
    "is": "áðéíóúýþæö", "it": "àèéìíîòóùúªº", "lt": "ąčęėįšųūž", "lv": "āčēģīķļņōŗšūž",
    "mk": "абвгдѓежзѕијклљмнњопрстќуфхцчџшѐѝ", "mt": "ċġħżàèìòù", "nl af": "áéëèêïíîóöôúüû", "pl": "ąćęłńóśźż",
    "pt": "áâãàçéêíóôõúüªº", "ro": "ăâîșțşţ", "ru": "абвгдежзийклмнопрстуфхцчшщъыьэюяё", "se": "áčđŋšŧž",
    "sk": "áäčďéíĺľňóôŕšťúýžöü", "sq": "çë", "sr": "абвгдђежзијклљмнњопрстћуфхцчџш",
    "th": "กขฃคฅฆงจฉชซฌญฎฏฐฑฒณดตถทธนบปผฝพฟภมยรฤลฦวศษสหฬอฮฯะาำเแโใไๅๆ", "tr": "çğıöşüâîû",
    "uk": "абвгґдежзийклмнопрстуфхцчшщьюяєії", "vi": "àáâãèéêìíòóôõùúýăđĩũơưü", "wen": "ćčěłńóřŕśšžź",
    "ar": _ARABIC, "fa": _ARABIC + "پچژکگی", "ur": _ARABIC + "ٹپچڈڑکگںھہیے",
}  # fmt: skip
_LETTERS = tuple(frozenset(letters) for letters in _ALPHABETS.values())
_SYMBOL_IN_WORD = re.compile(r"(?<=[^\W\d_])[¹²³¼½¾¤¥£¢¦§©®¬¯±¶¸×÷€†‡‰¡¿\u2500-\u259f](?=[^\W\d_])")
_SCRIPTS_MEET = re.compile(r"[a-z][\u0370-\u1fff]|[\u0370-\u1fff][a-z]")  # Latin and another script in one word
_DOTTED = "\u0307"  # str.lower() turns the Turkish dotted I into i and this combining dot


def count_letters(text: str) -> Counter[str]:
    """Count the non-ASCII letters in lower case, and the symbols found inside words, where only letters belong."""
    lower = text.lower()
    letters = Counter(letter for letter in lower if letter > "\x7f" and letter.isalpha() and letter != _DOTTED)
    return letters + Counter(_SYMBOL_IN_WORD.findall(lower)) + Counter(_SCRIPTS_MEET.findall(lower))


def is_latin(letters: Counter[str]) -> bool:
    """Return whether most of these letters are Latin."""
    return sum(count for letter, count in letters.items() if letter < "\u0370") * 2 >= letters.total()


def is_one_alphabet(letters: Counter[str], min_share: float) -> bool:
    """Return whether one language has at least `min_share` of the letters; the rest are taken for foreign names."""
    needed = letters.total() * min_share
    return any(sum(letters[letter] for letter in letters.keys() & own) >= needed for own in _LETTERS)
