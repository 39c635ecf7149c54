"""Compare verdicts and reasons of the Gopher and FineWeb rules with datatrove's, by language, on
the same texts.

    python tools/bench/rules_by_language.py TEXTS --datatrove PYTHON [--limit 50] [--dictionary]
    [--join 1]

TEXTS is the folder of a dataset prepared with `data.language.languages=[]` and `data.rules=[]`, or
a .jsonl.gz file with {"lang": …, "text": …} a line, of which `--join` make a text. Each language
uses its profile; with `--dictionary`, zh, ja and th use words of a dictionary. datatrove gets the
same thresholds and stop words, and splits words its own way. PYTHON is an interpreter that has
datatrove 0.10.1 and the libraries it splits words with.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys.config.language import LanguageProfile
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
)
from llmsys.data_pipeline.language.rules_by_language import list_profile_codes, read_profile
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.rule import WordSplitters
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import build_word_tokenizer
from llmsys.dataset.token_shards import read_batches

Said = dict[str, list[str]]  # by rule, datatrove's reason or "" for each text

REFERENCE = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import FineWebQualityFilter
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.utils.word_tokenizers import load_tokenizer_assignments
given = json.load(open(sys.argv[1]))
known = load_tokenizer_assignments()
language = given["code"]
if language not in known:
    sys.exit(f"it has no words for {language}")
def options(one):
    return {k: [tuple(pair) for pair in v] if k.endswith("grams") else v for k, v in one.items()}
rules = {"gopher_repetition": GopherRepetitionFilter, "gopher_quality": GopherQualityFilter,
         "fineweb_quality": FineWebQualityFilter}
filters = {}
for name, one in given["options"].items():
    filters[name] = rules[name](language=language, **options(one))
start = time.process_time()
said = {name: [] for name in filters}
for text in given["texts"]:
    for name, one in filters.items():
        found = one.filter(Document(text=text, id="0", metadata={}))
        said[name].append("" if found is True else found[1])
json.dump({"seconds": time.process_time() - start, "said": said}, open(sys.argv[2], "w"))
"""

# datatrove knows languages by ISO 639-3, some with their script.
_CODES = """
ar:arb_Arab bg:bul ca:cat cs:ces da:dan de:deu el:ell en:eng es:spa et:ekk fa:fas_Arab fi:fin
fr:fra he:heb hi:hin_Deva hr:hrv hu:hun it:ita ja:jpn ko:kor lt:lit lv:lvs nb:nob nl:nld nn:nno
pl:pol pt:por ro:ron ru:rus sk:slk sl:slv sq:als sr:srp sv:swe sw:swh th:tha tr:tur uk:ukr vi:vie
zh:cmn
"""
ISO_639_3 = dict(pair.split(":") for pair in _CODES.split())

REASONS = {
    "empty text": "empty",
    "share of duplicate paragraphs": "dup_para_frac",
    "share of characters in duplicate paragraphs": "dup_para_char_frac",
    "share of duplicate lines": "dup_line_frac",
    "hash signs per word": "gopher_too_many_hashes",
    "ellipses per word": "gopher_too_many_ellipsis",
    "share of lines that start with a bullet": "gopher_too_many_bullets",
    "share of lines that end with an ellipsis": "gopher_too_many_end_ellipsis",
    "share of words with a letter": "gopher_below_alpha_threshold",
    "stop words": "gopher_enough_stop_words",
    "share of lines with an end mark": "line_punct_ratio",
    "share of short lines": "short_line_ratio",
    "newlines per word": "list_ratio",
    "words <": "gopher_short_doc",
    "words >": "gopher_long_doc",
    "mean word length <": "gopher_below_avg_threshold",
    "mean word length >": "gopher_above_avg_threshold",
    "gopher_repetition: share of characters in duplicate lines": "dup_line_char_frac",
    "fineweb_quality: share of characters in duplicate lines": "char_dup_ratio",
    **{f"share of characters in the most frequent {n}-gram": f"top_{n}_gram" for n in (2, 3, 4)},
    **{
        f"share of characters in duplicate {n}-grams": f"duplicated_{n}_n_grams"
        for n in range(5, 11)
    },
}


def main() -> int:
    """Compare and print a line per language."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path)
    parser.add_argument("--datatrove", metavar="PYTHON", required=True)
    parser.add_argument(
        "--limit", type=int, default=50, help="texts of each language (default: %(default)s)"
    )
    parser.add_argument(
        "--join", type=int, default=1, help="lines of the file in a text (default: %(default)s)"
    )
    parser.add_argument(
        "--only", default="", metavar="CODES", help="languages, joined by commas (default: all)"
    )
    parser.add_argument(
        "--dictionary", action="store_true", help="words of a dictionary for zh, ja and th"
    )
    arguments = parser.parse_args()
    texts = read_texts(arguments.texts, arguments.join)
    wanted = (
        arguments.only.split(",")
        if arguments.only
        else sorted(set(texts) & set(list_profile_codes()) & set(ISO_639_3))
    )
    total: Counter[str] = Counter()
    for code in wanted:
        folder = "dictionary/" if arguments.dictionary and code in ("zh", "ja", "th") else ""
        own = texts[code][: arguments.limit]
        profile = read_profile(f"data/languages/{folder}{code}")
        start = time.process_time()
        ours = apply_rules(own, profile, code)
        took = time.process_time() - start
        try:
            theirs, seconds = run_datatrove(arguments.datatrove, own, profile, code)
        except LookupError as error:
            print(f"{code}: datatrove did not answer: {error}")
            continue
        pairs = [
            (one, other)
            for rule in ours
            for one, other in zip(ours[rule], theirs[rule], strict=True)
        ]
        equal = sum(one == other for one, other in pairs)
        keep = sum((not one) == (not other) for one, other in pairs)
        total += Counter(verdicts=len(pairs), reasons=equal, decisions=keep)
        kept = sum(not any(ours[rule][number] for rule in ours) for number in range(len(own)))
        print(
            f"{code}{' by dictionary' if folder else ''}: {len(own)} texts, {kept} kept; equal "
            f"decisions {keep}, reasons too {equal} of {len(pairs)}; CPU seconds {took:.1f} and "
            f"{seconds:.1f}",
            flush=True,
        )
    print(
        f"all: decisions {total['decisions']}, reasons too {total['reasons']} of "
        f"{total['verdicts']}"
    )
    return 0


def read_texts(path: Path, join: int) -> dict[str, list[str]]:
    """Return the texts by language."""
    found: dict[str, list[str]] = defaultdict(list)
    if path.is_dir():
        for file in sorted((path / "documents").glob("part-*.arrow")):
            for batch in read_batches(file):
                for code, text in zip(
                    *(batch.column(name).to_pylist() for name in ("language", "text")), strict=True
                ):
                    found[code].append(text)
        return found
    for line in gzip.decompress(path.read_bytes()).decode().split("\n"):
        if line:
            found[json.loads(line)["lang"]].append(json.loads(line)["text"])
    return {
        code: ["\n".join(own[first : first + join]) for first in range(0, len(own), join)]
        for code, own in found.items()
    }


def build_rules(profile: LanguageProfile) -> tuple[Any, ...]:
    """Return the three rules for documents in the language of a profile."""
    return tuple(
        profile.localize_rule(one)
        for one in (GopherRepetitionConfig(), GopherQualityConfig(), FinewebQualityConfig())
    )


def apply_rules(texts: Sequence[str], profile: LanguageProfile, code: str) -> Said:
    """Return the verdict of each of our rules alone, in datatrove's words."""
    splitters = WordSplitters(WordSplitter(build_word_tokenizer(profile.words)))
    said: Said = {}
    for rule in build_rules(profile):
        (outcome,) = RuleChain([rule], splitters, code).apply(pa.array(texts, pa.large_string()))
        columns = (
            column.to_pylist() for column in (outcome.test, outcome.value, outcome.threshold)
        )
        said[rule.kind] = [_format_reason(rule.kind, *row) for row in zip(*columns, strict=True)]
    return said


def _format_reason(
    rule: str, test: str | None, value: float | None, threshold: float | None
) -> str:
    if test is None:
        return ""
    sides = f"{test} {'<' if (value or 0) < (threshold or 0) else '>'}"
    return next(
        (REASONS[name] for name in (test, f"{rule}: {test}", sides) if name in REASONS), test
    )


def run_datatrove(
    python: str, texts: Sequence[str], profile: LanguageProfile, code: str
) -> tuple[Said, float]:
    """Return the verdicts of datatrove's filters with the same thresholds, and its CPU seconds.

    LookupError when it cannot run, as for words of a library that is not installed.
    """
    repetition, quality, fineweb = build_rules(profile)
    options = {
        "gopher_repetition": {
            "dup_line_frac": repetition.max_duplicate_line_share,
            "dup_para_frac": repetition.max_duplicate_paragraph_share,
            "dup_line_char_frac": repetition.max_duplicate_line_character_share,
            "dup_para_char_frac": repetition.max_duplicate_paragraph_character_share,
            "top_n_grams": [(n, getattr(repetition, f"max_top_{n}gram_share")) for n in (2, 3, 4)],
            "dup_n_grams": [
                (n, getattr(repetition, f"max_duplicate_{n}gram_share")) for n in range(5, 11)
            ],
        },
        "gopher_quality": {
            "min_doc_words": quality.min_words,
            "max_doc_words": quality.max_words,
            "min_avg_word_length": quality.min_mean_word_length,
            "max_avg_word_length": quality.max_mean_word_length,
            "max_non_alpha_words_ratio": quality.min_alphabetic_word_share,
            "min_stop_words": quality.min_stop_words,
            "stop_words": quality.stop_words,
        },
        "fineweb_quality": {
            "line_punct_thr": fineweb.min_end_mark_line_share,
            "short_line_thr": fineweb.max_short_line_share,
            "short_line_length": fineweb.short_line_characters,
            "char_duplicates_ratio": fineweb.max_duplicate_line_character_share,
            "new_line_ratio": fineweb.max_newlines_per_word,
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.json"), Path(folder, "said.json")
        given.write_text(
            json.dumps({"code": ISO_639_3[code], "texts": list(texts), "options": options})
        )
        command = [python, "-W", "ignore", "-c", REFERENCE, str(given), str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise LookupError(run.stderr.strip().splitlines()[-1])
        found = json.loads(made.read_text())
    return found["said"], float(found["seconds"])


if __name__ == "__main__":
    sys.exit(main())
