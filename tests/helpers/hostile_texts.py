"""Texts on which two splitters of words could disagree: random pieces of exceptions, affixes,
addresses, white space and odd characters.
"""

import random
import unicodedata

from llmsys.data_pipeline.text.splitting_rules import load_splitting_rules

SPACES = [chr(point) for point in range(0x3001) if chr(point).isspace()]
# letters that re.IGNORECASE joins, marks of letters, digits of other scripts, emoji, NUL, private
# use, and the ends of planes
ODD = [
    "ſ", "K", "İ", "ı", "ß", "ﬅ", "ẞ", "É", "e\u0301", "\u0301", "क्षि", "\u200d", "\u200c",
    "👉🏽", "👩‍👩‍👧", "ಠ_ಠ", "\0", "\x01", "\x7f", "\xad", "\ufeff", "\ufffe", "\ufffd",
    "\ue000", "\ud7ff", "\U0010ffff", "\U0001f600", "𝒳", "𞤀", "²", "½", "٣", "४", "Ⅷ", "一",
    "あ", "ア", "가", "ก", "፡", "։", "؟", "،", "。",
    "、", "「", "」", "…", "……", "—", "–", "‐", "‑",
    "’", "‘", "“", "”", "«", "»", "¿", "¡", "°", "°C.", "€", "₽", "£", "§", "©", "™",
    "\u0378", "\U0002fffe", "\U000e0001",
]  # fmt: skip
PLAIN = [
    *"abcdefgXYZ0123456789.,;:!?()[]{}<>_#*&'\"`-+=/%$^~|@\\", "...", "--", "---", "'s", "'S",
    "n't", "word", "Word", "WORD", "straße", "naïve", "слово", "Слово", "λέξη", "kelime",
    "l'", "d'", "dell'", "km", "kg", "m/s", "10", "3.14", "1,000", "2024", "US$", "C$",
    "http://", "https://", "www.", ".com", ".co.uk", "a.b.c", "x@y.org", "10.0.0.1", ":8080",
    "/a?b=c", "e.g.", "U.S.", "a.m.", "z.B.", "т.е.", "MMXXIV.", "1:30", "5-6", "aujourd'hui",
    "peut-être", "anti-", "AB.", "Ab.", "ab.", "ikke-", "kata-", "buku-buku", "di-", "-nya",
    "-e", "15%", "15%-os",
]  # fmt: skip


def list_unassigned(count: int) -> list[str]:
    """List characters that the running Python knows nothing of."""
    points = range(0x370, 0x20000)
    found = [chr(point) for point in points if unicodedata.category(chr(point)) == "Cn"]
    return found[:: max(len(found) // count, 1)]


def list_hostile_texts(seed: int, count: int, rules: str) -> list[str]:
    """Return texts of random pieces.

    Args:
        seed: Gives other texts.
        count: Number of texts.
        rules: The language whose exceptions are among the pieces.

    Returns:
        The texts, the first of them empty, white space and a very long chunk.
    """
    source = random.Random(seed)
    exceptions = sorted(load_splitting_rules(rules).exceptions)
    unassigned = list_unassigned(40)

    def build_chunk() -> str:
        if source.random() < 0.1:
            return source.choice('([{"“«') + source.choice(exceptions) + source.choice(')]}"”»,')
        kinds = source.choices((PLAIN, ODD, exceptions, unassigned), (12, 4, 5, 0.2), k=1)
        pieces = source.choices(kinds[0], k=source.choice((1, 1, 2, 3)))
        pieces += source.choices(PLAIN, k=source.choice((0, 0, 1, 2, 5)))
        source.shuffle(pieces)
        return "".join(pieces)

    def build_space() -> str:
        if source.random() < 0.7:
            return source.choice((" ", " ", " ", "\n"))
        return "".join(source.choices([*SPACES, "\r\n"], k=source.choice((1, 2, 3))))

    texts = ["", " ", "\r\n", "x" * 2_000, "(" * 1_001, "a." * 700 + " b"]
    while len(texts) < count:
        pieces = [build_chunk() + build_space() for _ in range(source.choice((1, 3, 20, 60)))]
        texts.append("".join(pieces).removesuffix(" "))
    return texts
