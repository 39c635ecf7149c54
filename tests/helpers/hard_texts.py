"""Texts made to be hard for rules: every kind of white space and line end, marks of many
scripts, odd words.
"""

import random

SPACES = [" "] * 30 + ["\n"] * 6 + ["\n\n"] * 2 + [
    "  ", "\t", "\u00a0", "\r\n", "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x85",
    "\u1680", "\u2000",
    "\u2003", "\u2009", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000",
    "\ufeff", "\u2060",
    "\u00ad", " \n", " \n \n", "\n\t\n",
]  # fmt: skip

COMMON = [
    "the", "of", "and", "to", "mill", "wheel", "water", "that", "have", "with", "town", "river",
    "be", "people",
]  # fmt: skip
ODD = [
    "don't", "e.g.", "U.S.", "10%", "#", "...", "…", "-", "•", "!", "word.", "end?", '"quoted."',
    "(aside)",
    "[1]", "[edit]", "[12]", "[]", "{", "}", "javascript", "cookies", "lorem", "ipsum", "3.14",
    "a/b",
    "foo_bar", "Mr.", "'tis", "naïve", "Äpfel", "数据", "。", "😀",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "🇩🇪🇫🇷", "well-known", "x", "I", "0", "state,",
    "semi;",
    "can't", "shan't", "y'all", "ma'am", "o'clock", "Dr.", "Ph.D.", "a.m.", "Inc.", ":-)", ":)",
    ":(", ";D",
    "<3", "^_^", "(:", "):", "'(", "')", ":'(", "¯\\(ツ)/¯", "http://a.b/c?d=e&f=g#h",
        "me@example.org", "C++",
    "C#", ".NET", "$5.00", "€3", "10km", "1,000", "1.000,5", "--", "—", "–", "*", "**",
    "***bold***", "`code`",
    "~", "|", "||", "==", "=>", "<-", "<<", "\\n", "//", "/*", "@user", "#tag", "½", "²", "™", "№",
    "§", "·",
    "●", "○", "■", "▪", "‣", "ﬁ", "ſ", "İ", "ı", "K", "Å", "ǅ", "ß", "ẞ", "ς", "पा", "हिंदी", "।",
    "॥", "ไทย",
    "한국어", "日本語。", "これは！", "カタカナー", "ｶﾞ", "１２３", "？", "．", "؟", "مرحبا", "،", "שלום", "״",
    "׳", "։", "\u0301", "e\u0301", "A.", "B.C.", "etc.", "vs.", "it's", "we'll", "cannot", "gonna",
    "d'you",
    "rock'n'roll", "'", "''", '"', '""', "“", "”", "‘", "’", "don’t", "«", "»", "..", "....", "?!",
    "‽", ".",
    ",", ";", ":", "(", ")", "[", "]", "1st", "1990s", "'90s", "12:30", "2020-01-01", "v1.2.3",
    "x86_64",
    "~/.bashrc", "foo()", "bar[0]", "{x}", "$VAR", "+1", "1e-5", "a==b", "a,b", "a;b", "a:b", "a.B",
    "end.Start", "(a)b", '"a"b',
]  # fmt: skip
LONG = ["x" * 1001 + " ", "-" * 300, "_" * 900 + " ", "=-" * 200 + " ", "a," * 300 + " "]


def write_hard_text(seed: int) -> str:
    """One text; the same seed gives the same text."""
    source = random.Random(seed)
    few_odd = COMMON * 8 + source.sample(ODD, 40)
    words = (
        source.sample(ODD + COMMON, source.randint(3, 150)) if source.random() < 0.5 else few_odd
    )
    usual = [" "] * 30 + ["\n"] * 4 + ["\n\n", source.choice(SPACES)]
    spaces = SPACES if source.random() < 0.3 else usual
    parts = [
        source.choice(words) + source.choice(spaces)
        for _ in range(source.choice([3, 30, 80, 150, 300]))
    ]
    for _ in range(source.randint(0, 3)):  # repeat a stretch, so that lines and n-grams repeat
        start = source.randrange(len(parts))
        parts += parts[start : start + source.randint(1, 60)] * source.randint(1, 3)
    if source.random() < 0.1:
        parts.insert(source.randrange(len(parts)), source.choice(LONG))
    return "".join(parts)
