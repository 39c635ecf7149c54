"""Compare the compiled core with Python on hostile pages and texts, by default with
AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tools.check_native [--seeds 1 2 3] [--pages 2000] [--crawl FILE …] [--plain]

Each seed gives other pages: random pieces of HTML, and changed pages of the crawl files (default:
the sample crawl). They are extracted in both orders, because a parser may keep the state of the
page before. Texts of each language with rules, a fiftieth as many as pages, are split into words,
their lines and n-grams are counted, and their languages scored. Prints two lines per seed; status 1
if a text, a word or a probability differs. A sanitizer ends the process at the first wrong access.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np

from llmsys.config.cleaning import ArticleExtractorConfig, ReadConfig
from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from llmsys.data_pipeline.extract.extractor import clean_text, iter_accepted_pages
from llmsys.data_pipeline.extract.main_content import extract_article
from llmsys.data_pipeline.language import naive_bayes
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.rules.compiled_lines import count_line_marks, count_repeated_lines
from llmsys.data_pipeline.rules.compiled_ngrams import count_repeated_ngrams, count_top_ngrams
from llmsys.data_pipeline.text.compiled_words import build_words_of_core
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer
from llmsys.data_pipeline.text.splitting_rules import FOLDER, SHARED
from llmsys.data_pipeline.text.word_columns import WordColumns
from tests.helpers.hostile_pages import list_hostile_pages
from tests.helpers.hostile_texts import list_hostile_texts
from tools.build_native import build_library

ROOT = Path(__file__).resolve().parent.parent
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LONGEST_PAGE = 60_000  # bytes of a page that is changed


def list_pages(files: Iterable[str]) -> list[bytes]:
    """List the pages of crawl files that are within the limits and not long."""
    config = ArticleExtractorConfig()
    return [
        page
        for file in files
        for batch in read_pages(file, max_page_bytes=config.max_page_bytes, config=ReadConfig())
        for page in iter_accepted_pages(batch.pages, config)
        if len(page) <= LONGEST_PAGE
    ]


def count_differences(core: NativeCore, pages: Sequence[bytes]) -> tuple[int, int]:
    """Return the number of pages with another text than Python's, and of those left to Python."""
    differences = 0
    texts = core.extract_articles(pages)
    for page, text in zip(pages, texts, strict=True):
        if text is not None:
            expected = clean_text(extract_article(page))
            differences += unicodedata.normalize("NFC", text.decode()) != expected
    return differences, texts.count(None)


def count_word_differences(core: NativeCore, seed: int, count: int) -> tuple[int, int]:
    """Return the number of texts with other words than Python's, and of all texts."""
    different = total = 0
    for path in sorted(FOLDER.glob("*.json")):
        if path.stem == SHARED:
            continue
        tokenizer = SpacyTokenizer(path.stem)
        compiled = build_words_of_core(core, tokenizer, 1_000, 100_000)
        assert compiled is not None, path
        texts = list_hostile_texts(seed, count, path.stem)
        columns = WordColumns(*compiled.split_words(texts))
        lines = np.array([len(text.splitlines()) for text in texts])
        compiled.count_lines(texts, lines)
        count_top_ngrams(core, columns)
        count_repeated_ngrams(core, columns)
        count_repeated_lines(core, texts)
        count_line_marks(core, texts)
        words = [columns.vocabulary.get_word(number) for number in columns.ids_W.tolist()]
        for text, (start, end) in zip(texts, pairwise(columns.offsets.tolist()), strict=True):
            expected = chain.from_iterable(tokenizer.split_words(text.split()))
            different += words[start:end] != list(expected)
        total += len(texts)
    return different, total


def count_language_differences(core: NativeCore, seed: int, count: int) -> tuple[int, int]:
    """Return the number of texts with other probabilities of languages, and of all texts."""
    texts = [
        text
        for path in sorted(FOLDER.glob("*.json"))
        if path.stem != SHARED
        for text in list_hostile_texts(seed, count, path.stem)
    ]
    texts += [" ".join(texts[start : start + 40]) for start in range(0, len(texts), 40)]
    model = naive_bayes.load_naive_bayes_model()
    different = 0
    for encoded in naive_bayes._iter_encoded_slices(texts):
        found = []
        for used in (core, CoreUnavailableError("for comparison")):
            with patch.object(naive_bayes, "load_core", lambda used=used: used):
                found.append(replace(model)._compute_label_probabilities(encoded))
        different += int((found[0] != found[1]).any(axis=1).sum())
    return different, len(texts)


def find_sanitizer() -> str:
    """Return the path of the runtime that must be loaded before Python."""
    command = [os.environ.get("CXX", "g++"), "-print-file-name=libasan.so"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(words: Sequence[str]) -> int:
    """Build the core, run every seed, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--pages", type=int, default=2_000, help="Pages of a seed.")
    parser.add_argument("--crawl", nargs="+", help="Crawl files whose pages are changed.")
    parser.add_argument("--plain", action="store_true", help="Build without sanitizers.")
    asked = parser.parse_args(words)
    if not asked.plain and "LD_PRELOAD" not in os.environ:
        # Python itself leaks at exit, and its memory is none of ours.
        wanted = {"LD_PRELOAD": find_sanitizer(), "ASAN_OPTIONS": "detect_leaks=0"}
        command = [sys.executable, "-m", "tools.check_native", *words]
        return subprocess.run(command, env={**os.environ, **wanted}, cwd=ROOT).returncode
    crawl = asked.crawl or sorted(map(str, (ROOT / "tests/data/sample_crawl").glob("*.warc.gz")))
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "llmsys_core.so"
        if reason := build_library(ROOT, library, () if asked.plain else SANITIZED):
            print(f"the core cannot be built: {reason}", file=sys.stderr)
            return 2
        core = NativeCore(library)
        changed = list_pages(crawl)
        for seed in asked.seeds:
            pages = list_hostile_pages(seed, asked.pages, changed)
            results = [count_differences(core, order) for order in (pages, pages[::-1])]
            different = sum(result[0] for result in results)
            failed += different
            print(
                f"seed {seed}: {len(pages):,} pages in both orders, {different} different, "
                f"{results[0][1]} left to Python",
                flush=True,
            )
            different, total = count_word_differences(core, seed, asked.pages // 50)
            failed += different
            print(f"seed {seed}: {total:,} texts, {different} with other words", flush=True)
            different, total = count_language_differences(core, seed, asked.pages // 50)
            failed += different
            print(f"seed {seed}: {total:,} texts, {different} with other languages", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
