"""Measure the filters that use the user's own lists on the pages of a crawl, next to datatrove's
where it has one.

    python tools/bench/filters.py 'crawl/*.warc.gz' [--datatrove PYTHON] [--limit 500] [--eval FILE
    FIELD]...

PYTHON is an interpreter with datatrove, ftfy, tldextract and pyahocorasick. Lists are made of the
crawl's own words. Prints CPU seconds of one process and the share of pages with an equal outcome.
For personal data both write tokens, because datatrove's other replacements depend on earlier
replacements.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys.config.cleaning import FtfyRepairConfig, PiiReplacementConfig, UrlFilterConfig
from llmsys.config.custom_rules import BadWordsConfig, EntryListConfig, WordListConfig
from llmsys.config.decontamination import EvaluationSetConfig, NgramDecontaminationConfig
from llmsys.data_pipeline.decontaminate.ngram_index import NgramIndex, write_ngram_index
from llmsys.data_pipeline.rules.bad_words import BadWordsRule
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from llmsys.data_pipeline.rules.url import UrlFilter
from llmsys.data_pipeline.text.pii_replacement import replace_pii
from llmsys.data_pipeline.text.unicode_repair import repair_texts
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_hashes import WordHasher
from llmsys.data_pipeline.text.word_tokenizers import WhitespaceTokenizer
from tools.bench.measurement import iter_crawl_texts, measure_cpu_seconds

# Runs under the other interpreter, over the same pages and lists.
REFERENCE = """
import json, re, sys, time, warnings
warnings.simplefilter("ignore")
from datatrove.data import Document
from datatrove.pipeline.filters.url_filter import URLFilter
from datatrove.pipeline.formatters.ftfy import FTFYFormatter
from datatrove.pipeline.formatters.pii import PIIFormatter
import tldextract
pages, words, out = *json.load(open(sys.argv[1])), {}
def timed(name, call, rows):
    call(rows[0])
    begun = time.process_time()
    found = [call(row) for row in rows]
    out[name] = [time.process_time() - begun, found]
lists = URLFilter(extra_domains=words["hosts"], banned_words=words["hard"],
                  soft_banned_words=words["soft"], banned_subwords=words["parts"],
                  use_integrated_lists=False)
lists.tldextractor = tldextract.TLDExtract(cache_dir=None, suffix_list_urls=())
def url(page):
    verdict = lists.filter(Document(text="", id="", metadata={"url": page[0]}))
    return None if verdict is True else verdict[1]
timed("url", url, pages)
timed("unicode", lambda page: FTFY.format(page[1]), pages) if (FTFY := FTFYFormatter()) else None
token = PIIFormatter(email_replacement="<EMAIL>", ip_replacement="<IP>")
timed("pii", lambda page: token.format(page[1]), pages)
pattern = re.compile(r"(?:\\W|^)({})(?:\\W|$)".format("|".join(map(re.escape, words["bad"]))))
timed("bad_words", lambda page: bool(pattern.search(page[1].lower())), pages)
json.dump(out, open(sys.argv[2], "w"))
"""
URL_TESTS = {
    "domain": "domain", "subdomain": "subdomain", "url": "url", "hard word": "hard_blacklisted",
    "soft words": "soft_blacklisted", "substring": "blacklisted_subword",
}  # fmt: skip

Page = tuple[str, str]


def main() -> int:
    """Measure and print."""
    options = _build_parser().parse_args()
    pages = _read_pages(options.crawl, options.limit)
    words = _build_lists(pages)
    ours = _measure_ours(pages, words)
    theirs = _measure_datatrove(options.datatrove, pages, words) if options.datatrove else {}
    size = sum(len(text.encode()) for _, text in pages) / 1e6
    print(f"{len(pages):,} pages, {size:.1f} MB of text, CPU seconds of one process")
    for name, (seconds, outcome) in ours.items():
        print(
            f"{name:10} {seconds:8.2f} s {size / seconds:8.1f} "
            f"MB/s{_format_comparison(theirs.get(name), seconds, outcome)}"
        )
    if options.eval:
        _measure_decontamination([text for _, text in pages], options.eval, size)
    return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("crawl", help="pattern of crawl files")
    parser.add_argument("--datatrove", help="interpreter that has datatrove")
    parser.add_argument(
        "--limit", type=int, default=500, help="pages at most, 0: all (default: 500)"
    )
    parser.add_argument(
        "--eval", nargs=2, action="append", metavar=("FILE", "FIELD"), help="an evaluation set"
    )
    return parser


def _read_pages(pattern: str, limit: int) -> list[Page]:
    columns = (
        zip(urls.to_pylist(), texts.to_pylist(), strict=True)
        for urls, texts in iter_crawl_texts([pattern])
    )
    return list(islice((page for pages in columns for page in pages if page[1]), limit or None))


def _build_lists(pages: Sequence[Page]) -> dict[str, list[str]]:
    """Return lists that reject some of the pages."""
    seen = sorted(
        {
            word
            for _, text in pages
            for word in text.lower().split()
            if word.isascii() and word.isalpha()
        }
    )
    hosts = sorted({url.split("/")[2] for url, _ in pages})
    return {
        "hosts": hosts[::7], "hard": ["license", "buy"], "soft": ["html", "doc", "en", "docs"],
        "parts": ["sect", "apt"], "bad": [word[::-1] for word in seen[::40] if len(word) > 2][:400],
    }  # fmt: skip


def _measure_ours(
    pages: Sequence[Page], words: dict[str, list[str]]
) -> dict[str, tuple[float, list[Any]]]:
    listed = {name: EntryListConfig(entries=tuple(entries)) for name, entries in words.items()}
    rules = UrlFilter(
        UrlFilterConfig(
            hosts=listed["hosts"],
            hard_words=listed["hard"],
            soft_words=listed["soft"],
            substrings=listed["parts"],
        )
    )
    bad = BadWordsRule(BadWordsConfig(word_lists=(WordListConfig(entries=tuple(words["bad"])),)))
    texts = pa.array([text for _, text in pages], pa.large_string())
    batch = DocumentBatch(texts.to_pylist(), WordSplitters(WordSplitter(WhitespaceTokenizer())))
    rules.apply([pages[0][0]])
    repair_texts(texts[:1], FtfyRepairConfig())
    urls, refusals = measure_cpu_seconds(lambda: rules.apply([url for url, _ in pages]))
    unicode, repaired = measure_cpu_seconds(
        lambda: repair_texts(texts, FtfyRepairConfig()).texts.to_pylist()
    )
    tokens = PiiReplacementConfig(replacement="token")
    pii, replaced = measure_cpu_seconds(
        lambda: replace_pii(texts, [""] * len(texts), tokens)[0].to_pylist()
    )
    bad_words, verdicts = measure_cpu_seconds(lambda: bad.apply(batch))
    return {
        "url": (urls, [URL_TESTS[one.test] if one else None for one in refusals]),
        "unicode": (unicode, repaired),
        "pii": (pii, replaced),
        "bad_words": (bad_words, (verdicts.failed_D >= 0).tolist()),
    }


def _measure_datatrove(
    python: str, pages: Sequence[Page], words: dict[str, list[str]]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.json"), Path(folder, "made.json")
        given.write_text(json.dumps([pages, words]))
        subprocess.run(
            [python, "-c", REFERENCE, str(given), str(made)], check=True, stdout=sys.stderr
        )
        found: dict[str, Any] = json.loads(made.read_text())
    return found


def _format_comparison(theirs: Any, seconds: float, outcome: list[Any]) -> str:
    if theirs is None:
        return ""
    equal = sum(one == other for one, other in zip(theirs[1], outcome, strict=True))
    return (
        f"   datatrove {theirs[0]:8.2f} s, {theirs[0] / seconds:5.1f} times; equal for {equal:,} "
        f"of {len(outcome):,}"
    )


def _measure_decontamination(
    texts: Sequence[str], sets: Sequence[Sequence[str]], size: float
) -> None:
    """Index the sets and search for them in all texts, twice."""
    config = NgramDecontaminationConfig(
        sets=tuple(
            EvaluationSetConfig(name=path, files=(Path(path),), query_fields=(field,))
            for path, field in sets
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        grams, items = Path(folder, "grams.arrow"), Path(folder, "items.arrow")
        indexing, _ = measure_cpu_seconds(
            lambda: write_ngram_index(lambda *_: None, grams=grams, items=items, config=config)
        )
        index, words = NgramIndex(grams), WordHasher()
    cold, found = measure_cpu_seconds(
        lambda: [
            index.find_matches(words.hash_words(texts[n : n + 64]))
            for n in range(0, len(texts), 64)
        ]
    )
    warm, _ = measure_cpu_seconds(
        lambda: [
            index.find_matches(words.hash_words(texts[n : n + 64]))
            for n in range(0, len(texts), 64)
        ]
    )
    matches = sum(len(positions) for positions, _ in found)
    print(
        f"decontamination: {len(index.words):,} n-grams indexed in {indexing:.2f} s, {matches:,} "
        "matches"
    )
    print(
        f"  from cold {cold:.2f} s ({size / cold:.1f} MB/s), warm {warm:.2f} s ({size / warm:.1f} "
        "MB/s)"
    )


if __name__ == "__main__":
    sys.exit(main())
