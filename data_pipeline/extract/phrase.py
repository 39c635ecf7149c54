"""Short runs of text that speak about the page and not about its subject, known by how they begin.

Reads the text of a run, says whether it is such a phrase: a call to subscribe, share or read something else, a notice
of copyright, the credit of a picture. Phrases are those of whole families of sites, in some languages of the web.
"""

import re

LONGEST = 160  # characters; what is longer is looked at by no phrase
# What may follow the first word, by first word. `.` allows anything.
_FOLLOWED = {
    "read": r"(?:more|also|next)\b", "see": r"(?:more|also)\b", "watch": r"(?:more|next|now|also)\b",
    "listen": r"now\b", "discover": r"more\b", "find": r"out more\b", "learn": r"more\b", "click": r"here\b",
    "also": r"(?:read|on|see|watch|check)\b", "more": r"(?:from|on|stories|news)\b", "related": ".", "related:": ".",
    "recommended": ".", "subscribe": ".", "sign": r"up\b", "signup": ".", "follow": r"(?:us|me|him|her|@)",
    "share": r"(?:this|on|with|your)\b", "advertisement": ".", "sponsored": ".",
    "like": r"this (?:story|article|post)\b", "love": r"this (?:story|article|post)\b",
    "enjoyed": r"this (?:story|article|post)\b", "get": r"(?:the|our) (?:latest|newsletter|best|app)\b",
    "have": r"a (?:news )?tip\b", "got": r"a (?:news )?tip\b", "image": r"(?:credit|by|courtesy|source|via|©|:)",
    "photo": r"(?:credit|by|courtesy|source|via|©|:)", "image:": ".", "photo:": ".", "photos:": ".", "picture:": ".",
    "©": ".", "(c)": ".", "copyright": ".", "all": r"rights reserved", "tags:": ".", "tag:": ".", "filed": r"under\b",
    "posted": r"(?:in|by|on)\b", "leave": r"a (?:comment|reply)\b", "last": r"(?:updated|modified)\b",
    "download": r"(?:the|our) app\b", "join": r"(?:us|our)\b", "source:": ".", "lesen": r"sie auch\b",
    "mehr": r"zum thema\b", "weitere": r"(?:infos|informationen|artikel|themen)\b", "auch": r"interessant\b",
    "das": r"könnte sie\b", "teilen": ".", "foto:": ".", "fotos:": ".", "bild:": ".", "bilder:": ".", "quelle:": ".",
    "anzeige": ".", "lea": r"también\b", "lee": r"también\b", "ver": r"también\b", "suscríbete": ".",
    "leia": r"(?:também|mais)\b", "lire": r"aussi\b", "voir": r"aussi\b", "czytaj": r"też\b", "zobacz": r"też\b",
    "leggi": r"anche\b",
}  # fmt: skip
_PATTERNS = {word: re.compile(rest, re.IGNORECASE) for word, rest in _FOLLOWED.items() if rest != "."}
_GLUED = ("©", "相关阅读", "相关文章", "责任编辑", "責任編輯", "関連記事")
_AROUND = " \t\n-–—•*>»|[\"“'#+👉"


def is_phrase(text: str) -> bool:
    """Whether a short run is about the page."""
    if len(text) > LONGEST:
        return False
    text = text.lstrip(_AROUND)
    word, _, rest = text.partition(" ")
    word = word.lower()
    if word not in _FOLLOWED:
        return text.startswith(_GLUED)
    pattern = _PATTERNS.get(word)
    return pattern is None or pattern.match(rest) is not None
