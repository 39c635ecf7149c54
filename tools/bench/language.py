"""Measure language identifiers: accuracy, confusions, and documents per second.

    python tools/bench/language.py SENTENCES.jsonl.gz [--join 10] [--every 1]

SENTENCES has one {"lang": …, "text": …} a line, such as lingua's accuracy report. `--join` also
measures texts of that many sentences, `--every` takes a part of the sentences. Seconds are CPU
seconds of one process. Prints last how often the batched model and py3langid itself differ.
"""

import argparse
import gzip
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

from llmsys.config.language import LanguageConfig, normalize_language_code
from llmsys.data_pipeline.language.identify import identify_languages

Kind = Literal["combined", "cld2", "py3langid"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sentences", type=Path)
    parser.add_argument("--join", type=int, default=10)
    parser.add_argument("--every", type=int, default=1)
    arguments = parser.parse_args()
    lines = gzip.decompress(arguments.sentences.read_bytes()).decode().split("\n")
    samples = [json.loads(line) for line in lines if line][:: arguments.every]
    sentences = [(one["lang"], one["text"]) for one in samples]
    report_accuracy(f"{len(sentences)} single sentences", sentences)
    report_accuracy(
        f"texts of {arguments.join} sentences", join_sentences(sentences, arguments.join)
    )
    compare_with_library([text for _, text in sentences][::10])


def report_accuracy(title: str, samples: Sequence[tuple[str, str]]) -> None:
    """Print accuracy by language, confusions, and speed, for each identifier."""
    print(f"\n{title}")
    texts = pa.array([text for _, text in samples], pa.large_string())
    truth = [code for code, _ in samples]
    right: dict[str, Counter[str]] = {}
    for kind in get_args(Kind):
        config = LanguageConfig(kind=kind)
        identify_languages(texts[:1], config)  # loads the model
        start = time.process_time()
        codes, scores = identify_languages(texts, config)
        seconds = time.process_time() - start
        pairs = list(zip(truth, codes.to_pylist(), strict=True))
        right[kind] = Counter(code for code, found in pairs if code == found)
        sure = [
            code == found
            for (code, found), score in zip(pairs, scores.to_pylist(), strict=True)
            if score > 0.65
        ]
        print(
            f"{kind}: {right[kind].total() / len(pairs):.4f} right, {len(pairs) / seconds:,.0f} a "
            f"second; score > 0.65 for {len(sure) / len(pairs):.3f}, of which "
            f"{sum(sure) / len(sure):.4f} right"
        )
        confused = Counter(pair for pair in pairs if pair[0] != pair[1])
        print(
            "  taken for: " + ", ".join(f"{a} → {b} {n}" for (a, b), n in confused.most_common(16))
        )
    print_languages(Counter(truth), right)


def print_languages(truth: Counter[str], right: dict[str, Counter[str]]) -> None:
    """Print one row per language that some identifier misses more than one time in ten."""
    print(f"  {'':6}" + "".join(f"{kind:>11}" for kind in right))
    for code in sorted(truth):
        shares = [counts[code] / truth[code] for counts in right.values()]
        if min(shares) < 0.9:
            print(f"  {code:6}" + "".join(f"{share:11.3f}" for share in shares))


def join_sentences(sentences: Sequence[tuple[str, str]], number: int) -> list[tuple[str, str]]:
    """Return texts of several sentences in one language."""
    by_code: defaultdict[str, list[str]] = defaultdict(list)
    for code, text in sentences:
        by_code[code].append(text)
    return [
        (code, " ".join(texts[start : start + number]))
        for code, texts in by_code.items()
        for start in range(0, len(texts) - number + 1, number)
    ]


def compare_with_library(texts: Sequence[str]) -> None:
    """Compare with py3langid itself, text by text."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    own = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    start = time.process_time()
    theirs = [own.classify(text) for text in texts]
    seconds = time.process_time() - start
    codes, scores = identify_languages(pa.array(texts), LanguageConfig(kind="py3langid"))
    differ = sum(
        normalize_language_code(a) != b for (a, _), b in zip(theirs, codes.to_pylist(), strict=True)
    )
    widest = max(abs(a - b) for (_, a), b in zip(theirs, scores.to_pylist(), strict=True))
    print(
        f"\npy3langid itself: {len(texts) / seconds:,.0f} a second; {differ} of {len(texts)} "
        f"codes differ, probabilities by {widest:.1e} at most"
    )


if __name__ == "__main__":
    main()
