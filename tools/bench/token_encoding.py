"""Measure encoding by columns next to the tokenizer's library, called per text and in a batch, in
one run.

    python tools/bench/token_encoding.py 'crawl/*.warc.gz' sentences.jsonl.gz [--tokenizer FILE]
    [--limit 40]

Every input is a separate set of texts: a pattern of crawl files (their pages are extracted
first), of document files of a dataset (.arrow), or of lines of JSON with a field `text` (.jsonl,
.jsonl.gz). Without --tokenizer four tokenizers are trained on all of them: SentencePiece's BPE and
unigram, and a byte-level BPE and a WordPiece as tokenizer.json.

Prints MB/s of UTF-8 text by CPU seconds of one process, medians of three runs: the library per text
and its batch call, the encoder cold (new cache) and warm (second pass). Brackets hold the ratio to
each of the library's. The last column is the share of texts with equal ids, cold and warm.
"""

import argparse
import glob
import gzip
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, trainers

from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.data_pipeline.tokenize.column_encoder import ColumnEncoder, build_column_encoder
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.data_pipeline.tokenize.train_sentencepiece import fit_sentencepiece
from llmsys.dataset.token_shards import read_batches
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer
from tools.bench.measurement import iter_crawl_texts, measure_cpu_seconds

BATCH_BYTES = 8_000_000  # as document files have
RUNS = 3


def read_texts(pattern: str, limit_bytes: int) -> list[str]:
    """Return the texts of all files of a pattern, up to `limit_bytes`."""
    texts: list[str] = []
    left = limit_bytes
    for path in sorted(glob.glob(pattern)):
        for text in _iter_file_texts(Path(path)):
            if left <= 0:
                return texts
            texts.append(text)
            left -= len(text.encode())
    return texts


def _iter_file_texts(path: Path) -> Iterator[str]:
    if path.suffix == ".arrow":
        yield from _iter_arrow_texts(path)
    elif ".jsonl" in path.name:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield from (json.loads(line)["text"] for line in data.split(b"\n") if line)
    else:
        for _, texts in iter_crawl_texts([str(path)]):
            yield from texts.to_pylist()


def _iter_arrow_texts(path: Path) -> Iterator[str]:
    for batch in read_batches(path):
        yield from batch.column("text").drop_null().to_pylist()


def split_into_batches(texts: list[str]) -> list[pa.Array]:
    """Return the texts as columns of about the size of a record batch of document files."""
    batches: list[pa.Array] = []
    waiting: list[str] = []
    size = 0
    for text in texts:
        waiting.append(text)
        size += len(text.encode())
        if size >= BATCH_BYTES:
            batches.append(pa.array(waiting, pa.large_string()))
            waiting, size = [], 0
    return [*batches, pa.array(waiting, pa.large_string())] if waiting else batches


def train_tokenizers(
    folder: Path, texts: list[str], pieces: int
) -> Iterator[tuple[str, Tokenizer]]:
    """Yield a tokenizer of each kind, trained on these texts."""
    lines = [line for text in texts for line in text.split("\n") if line]
    for kind in ("bpe", "unigram"):
        config = SentencePieceConfig(vocab_size=pieces, model_type=kind)
        fit_sentencepiece(
            iter(lines),
            folder=folder / kind,
            config=config,
            sample={"documents": len(texts), "bytes": 0},
        )
        yield f"SentencePiece {kind.replace('bpe', 'BPE')}", load_tokenizer(folder / kind)
    level = Library(models.BPE())
    level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = Library(models.WordPiece(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = (
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    for name, library, trainer in (
        (
            "byte-level BPE, json",
            level,
            trainers.BpeTrainer(vocab_size=pieces, initial_alphabet=alphabet),
        ),
        (
            "WordPiece, json",
            words,
            trainers.WordPieceTrainer(vocab_size=pieces, special_tokens=["[UNK]"]),
        ),
    ):
        library.train_from_iterator(lines, trainer)
        library.add_special_tokens(["<end>"])
        file = folder / f"{name}.json"
        library.save(str(file))
        yield name, load_tokenizer(file, "<end>")


def encode_batches(encoder: ColumnEncoder, batches: list[pa.Array]) -> list[RaggedTokens]:
    """Return the tokens of every batch."""
    return [encoder.encode(batch) for batch in batches]


def measure_tokenizer(texts: list[str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return median seconds of each way, the smallest share of texts with equal ids, and why the
    library is used.
    """
    batches = split_into_batches(texts)
    seconds: dict[str, list[float]] = {"library": [], "batch": [], "cold": [], "warm": []}
    equal = len(texts)
    for _ in range(RUNS):
        took, theirs = measure_cpu_seconds(lambda: [tokenizer.encode(text) for text in texts])
        seconds["library"].append(took)
        took, _ = measure_cpu_seconds(
            lambda: [tokenizer.encode_batch(batch.to_pylist()) for batch in batches]
        )
        seconds["batch"].append(took)
        encoder = build_column_encoder(tokenizer)
        for name in ("cold", "warm"):
            took, ours = measure_cpu_seconds(partial(encode_batches, encoder, batches))
            seconds[name].append(took)
            equal = min(
                equal,
                sum(ids == other for ids, other in zip(_iter_rows(ours), theirs, strict=True)),
            )
    found: dict[str, Any] = {name: statistics.median(values) for name, values in seconds.items()}
    return found | {"equal": equal / len(texts), "reason": encoder.reason}


def _iter_rows(parts: list[RaggedTokens]) -> Iterator[list[int]]:
    for part in parts:
        ends = compute_offsets(part.lengths).tolist()
        values = part.values.tolist()
        yield from (values[begin:end] for begin, end in itertools.pairwise(ends))


def format_row(name: str, pattern: str, texts: list[str], found: dict[str, Any]) -> str:
    """Return a line of the table."""
    size = sum(len(text.encode()) for text in texts) / 1e6
    speeds = [f"{size / found[way]:.1f}" for way in ("library", "batch")]
    for way in ("cold", "warm"):
        times = ", ".join(f"{found[theirs] / found[way]:.1f}" for theirs in ("library", "batch"))
        speeds.append(f"{size / found[way]:.1f} ({times})")
    why = f"; by the library: {found['reason']}" if found["reason"] else ""
    return " | ".join(
        [
            "",
            name,
            f"{Path(pattern).name}, {size:.1f} MB",
            *speeds,
            f"{found['equal']:.2%}{why}",
            "",
        ]
    ).strip()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs", nargs="+", metavar="PATTERN", help="crawl, document or JSON lines files"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="FILE", help="a tokenizer.model or tokenizer.json"
    )
    parser.add_argument(
        "--eos-token",
        metavar="PIECE",
        help="the end of a document, where a tokenizer.json does not say",
    )
    parser.add_argument(
        "--pieces", type=int, default=32_000, help="of the tokenizer trained (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=float, default=40, metavar="MB", help="of each input (default: %(default)s)"
    )
    arguments = parser.parse_args()
    sets = {
        pattern: read_texts(pattern, int(arguments.limit * 1e6)) for pattern in arguments.inputs
    }
    if empty := [pattern for pattern, texts in sets.items() if not texts]:
        print(f"no text in {empty[0]}", file=sys.stderr)
        return 2
    everything = [text for texts in sets.values() for text in texts]
    file: Path | None = arguments.tokenizer
    print(
        "| tokenizer | texts | library | its batch call | cold | warm | equal ids "
        "|\n|---|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        given = [(file.name, load_tokenizer(file, arguments.eos_token))] if file else None
        for name, tokenizer in given or train_tokenizers(
            Path(folder), everything, arguments.pieces
        ):
            for pattern, texts in sets.items():
                print(
                    format_row(name, pattern, texts, measure_tokenizer(texts, tokenizer)),
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
