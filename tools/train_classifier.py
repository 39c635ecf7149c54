"""Train a linear classifier on labelled texts, for the rule `linear_classifier`.

    python tools/train_classifier.py good.tsv bad.jsonl.gz --output quality.npz [--bits 18]
    [--word-ngrams 2]
        [--char-ngrams 3-5] [--held-back 0.1]

A .tsv line is label, tab, text; a .jsonl line has `label` and `text`; both plain or .gz. Prints the
accuracy on held- out texts, which are chosen by their hash; the file is written from the same
training.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llmsys.data_pipeline.pairs.read import iter_text_pairs
from llmsys.data_pipeline.rules.classifier import LinearModel, LinearScorer, train_linear_model
from llmsys.data_pipeline.rules.hashed_features import FeatureConfig
from llmsys.errors import DataError, LlmsysError
from llmsys.storage.paths import parse_local_path

Labelled = list[tuple[str, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print the accuracy, and write the file."""
    options = _build_parser().parse_args(arguments)
    try:
        features = FeatureConfig(options.bits, options.word_ngrams, options.char_ngrams)
        model, line = train_classifier(options.files, features, options.held_back, options.penalty)
    except LlmsysError as error:
        print(error, file=sys.stderr)
        return 1
    model.save(options.output)
    print(f"{options.output}: {line}")
    return 0


def train_classifier(
    files: Sequence[Path], features: FeatureConfig, held_back: float, penalty: float
) -> tuple[LinearModel, str]:
    """Train on files of labelled texts; return the model and one line about it."""
    lines = [line for path in files for line in iter_text_pairs((path,))]
    rows = [(line.source, line.target) for line in lines if line.problem is None]
    unusable = (
        f", {len(lines) - len(rows):,} lines could not be used" if len(rows) < len(lines) else ""
    )
    kept, aside = _split_rows(rows, held_back)
    if len({label for _, label in kept}) < 2:
        raise DataError(
            f"{len(kept):,} texts have fewer than two labels. Give texts of each label that is to "
            "be told."
        )
    model = train_linear_model(
        [text for text, _ in kept], [label for _, label in kept], features, penalty
    )
    about = f"{len(kept):,} texts{unusable}, labels {', '.join(model.labels)}"
    if not aside:
        return model, about
    scores = LinearScorer(model).predict_probabilities([text for text, _ in aside])
    right = sum(
        model.labels[best] == label
        for best, (_, label) in zip(scores.argmax(axis=1), aside, strict=True)
    )
    return model, f"{about}; right for {right / len(aside):.1%} of {len(aside):,} texts held back"


def _split_rows(rows: Labelled, held_back: float) -> tuple[Labelled, Labelled]:
    """Return training texts and held-out texts, split by the hash of each."""
    kept: Labelled = []
    aside: Labelled = []
    for row in rows:
        digest = hashlib.blake2b(row[0].encode("utf-8", "surrogatepass"), digest_size=8).digest()
        (aside if int.from_bytes(digest, "big") / 2.0**64 < held_back else kept).append(row)
    return kept, aside


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=parse_local_path, help="labelled texts")
    parser.add_argument(
        "--output", type=parse_local_path, required=True, help="file of the model (.npz)"
    )
    parser.add_argument(
        "--bits", type=int, default=18, help="features are numbers below 2^bits (default: 18)"
    )
    parser.add_argument(
        "--word-ngrams", type=int, default=2, help="longest run of words (default: 2)"
    )
    parser.add_argument(
        "--char-ngrams", type=_parse_range, default=(0, 0), help="runs of characters, such as 3-5"
    )
    parser.add_argument(
        "--held-back", type=float, default=0.1, help="share of texts to measure on (default: 0.1)"
    )
    parser.add_argument("--penalty", type=float, default=1e-6, help="L2 penalty (default: 1e-6)")
    return parser


def _parse_range(text: str) -> tuple[int, int]:
    shortest, _, longest = text.partition("-")
    return int(shortest), int(longest or shortest)


if __name__ == "__main__":
    sys.exit(main())
