"""Measure the share of pages decoded correctly: pages in 47 charsets of real sentences in 26
languages.

    python tools/bench/charset.py sentences.jsonl.gz [--pages 12] [--sentences 5]

Reads lines with `lang` and `text`. Each page holds some sentences that the charset can write. A
charset and language without enough of them has no pages (lingua's sentences leave 44 charsets and
25 languages). Prints, by charset and in total, the share of pages decoded to the original: with the
right header, without one, and with eight wrong ones; and the same for a reader who trusts the
header (Python's codec of that name, else UTF-8, else cp1252).
"""

import argparse
import codecs
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator

from llmsys.data_pipeline.readers.charset import detect_charset

CHARSETS = {
    **dict.fromkeys(
        ("de", "sv"), "cp1252 iso8859-1 iso8859-15 mac_roman cp850 utf-16-le utf-16-be utf-8"
    ),
    **dict.fromkeys(("fr", "es", "pt", "it", "da"), "cp1252 iso8859-1 iso8859-15 mac_roman"),
    **dict.fromkeys(("pl", "cs", "hu", "hr", "sk"), "cp1250 iso8859-2 utf-8"),
    "ro": "cp1250 iso8859-16",
    **dict.fromkeys(
        ("ru", "bg"),
        "cp1251 koi8-r cp866 mac_cyrillic iso8859-5 utf-16-le utf-16-be utf-32-le utf-8",
    ),
    "uk": "cp1251 koi8-u utf-8",
    "el": "cp1253 iso8859-7 utf-8",
    "tr": "cp1254 iso8859-9 utf-8",
    "he": "cp1255 iso8859-8 utf-16-be utf-8",
    "ar": "cp1256 iso8859-6 utf-16-le utf-8",
    "lt": "cp1257 iso8859-13 iso8859-4 utf-8",
    "vi": "cp1258 utf-8",
    "th": "cp874 iso8859-11 utf-16-be utf-8",
    "ja": "cp932 shift_jis euc_jp iso2022_jp utf-16-le utf-16-be utf-32-be utf-8",
    "zh": "gb2312 gbk gb18030 hz big5 big5hkscs utf-16-le utf-16-be utf-32-le utf-8",
    "ko": "euc_kr cp949 johab iso2022_kr utf-16-le utf-16-be utf-8",
}
WRONG = (
    "utf-8",
    "iso-8859-1",
    "windows-1252",
    "windows-1251",
    "shift_jis",
    "gbk",
    "koi8-r",
    "no-such-charset",
)
# by those who name the first, today
MEANT = {"iso8859-1": "cp1252", "iso8859-9": "cp1254", "shift_jis": "cp932"}
# what the sentences have of wrong decodings themselves
_CONTROLS = set(map(chr, range(0x7F, 0xA0)))
WAYS = ("right header", "none", "wrong header")


def iter_pages(path: str, count: int, sentences: int) -> Iterator[tuple[str, str, str]]:
    """Yield language, charset and the text of a page that this charset can write."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        for row in map(json.loads, file):
            texts[row["lang"]].append(row["text"])
    for language, names in CHARSETS.items():
        for charset in names.split():
            able = [text for text in texts[language] if _can_write(text, charset)]
            for number in range(min(count, len(able) // sentences)):
                part = able[number * sentences : (number + 1) * sentences]
                yield (
                    language,
                    charset,
                    "<title>x</title>\n" + "".join(f"<p>{text}</p>\n" for text in part),
                )


def _can_write(text: str, charset: str) -> bool:
    if text.isascii() or _CONTROLS & set(text):
        return False
    try:
        return text.encode(charset).decode(MEANT.get(charset, charset)) == text
    except UnicodeError:
        return False


def decode_page(payload: bytes, header: str, *, believe: bool) -> str:
    """Return the page as our reader decodes it, or as a reader who trusts its header."""
    if not believe:
        return payload.decode(detect_charset(payload, header), "replace")
    for charset in (header, "utf-8"):
        try:
            return payload.decode(codecs.lookup(charset).name)
        except (LookupError, UnicodeError):
            continue
    return payload.decode("cp1252", "replace")


def main() -> None:
    """Print one row per charset, and the sums."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences_file")
    parser.add_argument("--pages", type=int, default=12)
    parser.add_argument("--sentences", type=int, default=5)
    parser.add_argument("--charset", default="", help="only charsets whose name begins like this")
    arguments = parser.parse_args()
    tallies: defaultdict[tuple[str, str, bool], list[bool]] = defaultdict(list)
    for language, charset, text in iter_pages(
        arguments.sentences_file, arguments.pages, arguments.sentences
    ):
        if not charset.startswith(arguments.charset):
            continue
        payload = text.encode(charset)
        for way, headers in zip(WAYS, ((charset,), ("",), WRONG), strict=True):
            for header in headers:
                for believe in (False, True):
                    is_right = decode_page(payload, header, believe=believe) == text
                    for name in (f"{charset} {language}", "all"):
                        tallies[name, way, believe].append(is_right)
    print(
        f"{'':18}"
        + "".join(f"{way:>15}" for way in WAYS)
        + f"{'believed: ':>16}"
        + "".join(f"{w:>15}" for w in WAYS)
    )
    for name in sorted({name for name, _, _ in tallies}):
        shares = {
            key[1:]: sum(tally) / len(tally) for key, tally in tallies.items() if key[0] == name
        }
        cells = [
            "".join(f"{shares[way, believe]:15.1%}" for way in WAYS) for believe in (False, True)
        ]
        print(f"{name:18}{cells[0]}{'':16}{cells[1]}  {len(tallies[name, 'none', False])} pages")


if __name__ == "__main__":
    main()
