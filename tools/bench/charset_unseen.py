"""Measure how often a correct charset header is trusted in languages that the pair table was not
counted on.

    python tools/bench/charset_unseen.py udhr2.zip [--lines 0] [--half held-out]

Reads a zip with one UTF-8 text per language, named by its ISO 639-3 code, such as the declaration
of human rights in NLTK's `udhr2.zip`. Languages that the table knows are left out. Each text with
letters beyond ASCII is encoded in every charset that can encode all of it, and read with that
charset as its header: as one page, or as pages of `--lines` lines. Prints by charset the number of
pages decoded to the original, and the languages that failed. `--half` selects the languages that
constants were chosen on, or the others, by a hash of the code.
"""

import argparse
import hashlib
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator

from llmsys.data_pipeline.readers.charset import detect_charset

COUNTED = (  # beginnings of the names of files, ISO 639-3
    "afr amh arb azj bel bul ben bos cat ces cym dan deu ell eng epo spa est eus pes fin fra gle "
    "guj heb hin hrv hun hye ind isl ita jpn kat kaz kor lat lug lit lav mri mkd khk mar mly nob "
    "nld nno gaz pan pol por ron rus slk slv sna som als srp sot swe swh tam tel tha tir tgl tsn "
    "tur tso ukr urd vie xho yor cmn zul"
)
HEADERS = {  # label of the web: the codec that writes it
    "iso-8859-1": "iso8859-1",
    "windows-1252": "cp1252",
    "iso-8859-15": "iso8859-15",
    "iso-8859-2": "iso8859-2",
    "windows-1250": "cp1250",
    "windows-1254": "cp1254",
    "windows-1257": "cp1257",
    "windows-1251": "cp1251",
    "koi8-r": "koi8-r",
    "macintosh": "mac_roman",
}
HALVES = ("all", "chosen-on", "held-out")
MIN_LETTERS = 3  # beyond ASCII


def read_pages(path: str, half: str, lines: int) -> Iterator[tuple[str, str]]:
    """Yield language and text of each page."""
    with zipfile.ZipFile(path) as archive:
        for name in sorted(archive.namelist()):
            language = name.rpartition("/")[2].removesuffix(".txt")
            code = language.partition("_")[0]
            if not code or code in COUNTED.split() or half not in ("all", find_half(code)):
                continue
            text = [
                line.strip()
                for line in archive.read(name).decode("utf-8-sig").split("\n")
                if line.strip()
            ]
            for begin in range(0, len(text), lines or len(text) or 1):
                page = "".join(
                    f"<p>{line}</p>\n" for line in text[begin : begin + (lines or len(text))]
                )
                if sum(letter > "\x7f" and letter.isalpha() for letter in page) >= MIN_LETTERS:
                    yield language, f"<title>x</title>\n{page}"


def find_half(code: str) -> str:
    """Return the half of the languages that a code belongs to."""
    return HALVES[1 + hashlib.sha256(code.encode()).digest()[0] % 2]


def main() -> None:
    """Print one row per charset, and the sum."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", help="zip with a UTF-8 text per language")
    parser.add_argument(
        "--half", choices=HALVES, default="all", help="which languages (%(default)s)"
    )
    parser.add_argument(
        "--lines", type=int, default=0, help="lines of a page; 0: the whole text (%(default)s)"
    )
    arguments = parser.parse_args()
    num_pages: Counter[str] = Counter()
    misread: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for language, text in read_pages(arguments.texts, arguments.half, arguments.lines):
        for label, codec in HEADERS.items():
            try:
                payload = text.encode(codec)
            except UnicodeEncodeError:
                continue
            num_pages[label] += 1
            found = detect_charset(payload, label)
            if payload.decode(found, "replace") != text:
                misread[label][f"{language} as {found}"] += 1
    print(f"{'header':14}{'pages':>8}{'misread':>9}")
    for label in num_pages:
        worst = ", ".join(f"{name} {count}" for name, count in misread[label].most_common(8))
        print(f"{label:14}{num_pages[label]:8}{misread[label].total():9}  {worst}")
    total, wrong = num_pages.total(), sum(counts.total() for counts in misread.values())
    print(f"{'all':14}{total:8}{wrong:9}  {1 - wrong / max(total, 1):.2%} right")


if __name__ == "__main__":
    main()
