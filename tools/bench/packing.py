"""Measure how fast documents are packed into windows, and what packing costs in padding and cropped
tokens.

    python tools/bench/packing.py [--length 4096] [--mean 900] [--tokens 40000000] [--json]

Document lengths are log-normal, as those of web text are; `--mean` is their mean in tokens. Rates
are medians of five rounds of placing one buffer after another, without reading tokens, in one
thread.
"""

import argparse
import json
import statistics
import time

import numpy as np
from numpy.typing import NDArray

from llmsys.data.document_packing import Packing, pack_documents
from llmsys.data.fitted_windows import BUFFER_TOKENS, MIN_BUFFER_WINDOWS, SPARE

ROUNDS = 5
# Spread of the logarithm of lengths: about that of documents from Common Crawl.
SIGMA = 1.2


def draw_spans(tokens: int, mean: float, length: int, seed: int) -> NDArray[np.int64]:
    """Return the sizes of documents with about `tokens` tokens, those longer than a window split
    into windows.
    """
    count = max(1, round(tokens / mean))
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, count)
    lengths = np.maximum(1, drawn).astype(np.int64)
    counts = -(-lengths // length)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    spans: NDArray[np.int64] = np.minimum(np.repeat(lengths, counts) - within * length, length)
    return spans


def measure_packing(
    packing: Packing, length: int, mean: float, tokens: int
) -> dict[str, float | str]:
    """Return tokens per second, and the shares of padded positions and cropped tokens."""
    size = max(BUFFER_TOKENS, MIN_BUFFER_WINDOWS * length)
    buffers = [draw_spans(size, mean, length, seed) for seed in range(max(1, tokens // size))]
    given = sum(int(spans.sum()) for spans in buffers)
    rates, kept, room = [], 0, 0
    for _ in range(ROUNDS):
        kept = room = 0
        began = time.perf_counter()
        for spans in buffers:
            windows = -(-int(spans.sum()) * (SPARE + 1) // (SPARE * length))
            kept += int(pack_documents(spans, length, windows, packing).kept.sum())
            room += windows * length
        rates.append(given / (time.perf_counter() - began))
    return {
        "packing": packing,
        "million_tokens_per_second": round(statistics.median(rates) / 1e6, 1),
        "padded_share": round(1 - kept / room, 5),
        "cropped_share": round(1 - kept / given, 5),
    }


def main() -> None:
    """Print one line per rule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--length", type=int, default=4096, help="tokens of a window (default: 4096)"
    )
    parser.add_argument(
        "--mean",
        type=float,
        default=900.0,
        help="mean length of documents in tokens (default: 900)",
    )
    parser.add_argument(
        "--tokens", type=int, default=40_000_000, help="tokens of a round (default: 40000000)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    words = parser.parse_args()
    packings: tuple[Packing, ...] = ("best_fit", "first_fit")
    rows = [
        measure_packing(packing, words.length, words.mean, words.tokens) for packing in packings
    ]
    for row in rows:
        print(
            json.dumps(row)
            if words.json
            else ", ".join(f"{name} {value}" for name, value in row.items())
        )


if __name__ == "__main__":
    main()
