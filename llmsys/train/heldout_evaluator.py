"""Loss on held-back documents, in nats per token and bits per byte, beside gzip and xz on the same bytes.

For models that continue text; others are measured on their targets, see measure.py.

The held-back documents of a mixture: each source by itself, and all of them together.
"""

import lzma
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.data.heldout_batches import HeldoutWindows
from llmsys.token_shards import TokenShards
from llmsys.tokenizer import Tokenizer
from llmsys.train.evaluator import EvaluationResult, Evaluator, LogitsFunction, TargetEvaluation, sum_over_rows

BITS_PER_NAT = 1.4426950408889634


@dataclass(frozen=True)
class HeldoutEvaluation:
    """What a model makes of held-back text. Every byte of it is paid for, and the end of each document too."""

    loss: float
    bits_per_byte: float
    perplexity: float
    evaluated_tokens: int
    evaluated_bytes: int
    gzip_bits_per_byte: float
    xz_bits_per_byte: float

    def to_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for events and JSON."""
        return asdict(self)


def build_heldout_windows(config: RunConfig, shards: TokenShards, tokenizer: Tokenizer) -> HeldoutWindows:
    """The held-back windows as this run cuts them."""
    return HeldoutWindows(
        shards,
        length=config.batch.sequence_length,
        opening_token=tokenizer.eos_id,
        separate_documents=config.batch.attend == "document",
        max_tokens=config.evaluation.max_tokens,
    )


class HeldoutEvaluator:
    """Evaluates engines on the held-back split; the compressors run once, when the first evaluation asks.

    `together` is the number of neighbouring ranks that get the same rows, see `measure`.
    """

    def __init__(self, config: RunConfig, shards: TokenShards, tokenizer: Tokenizer, ranks_per_row: int = 1) -> None:
        self._tokenizer = tokenizer
        self._ranks_per_row = ranks_per_row
        self._sequences = config.evaluation_sequences
        self._shards = shards
        self._windows = build_heldout_windows(config, shards, tokenizer)
        self._compressor_baselines: tuple[float, float] | None = None

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> HeldoutEvaluation:
        """Collective: every rank evaluates its windows and gets the same result."""
        windows = self._windows
        nats = sum_over_rows(windows, compute_logits, device, self._ranks_per_row, self._sequences).nats
        gzip, xz = self.compute_compressor_baselines()
        loss = nats / windows.tokens
        return HeldoutEvaluation(
            loss=loss,
            bits_per_byte=nats * BITS_PER_NAT / windows.text_bytes,
            perplexity=float(torch.tensor(loss).exp()),
            evaluated_tokens=windows.tokens,
            evaluated_bytes=windows.text_bytes,
            gzip_bits_per_byte=gzip,
            xz_bits_per_byte=xz,
        )

    def compute_compressor_baselines(self) -> tuple[float, float]:
        """Bits per byte of `gzip -9` and `xz -9` on the evaluated documents, one after another."""
        if self._compressor_baselines is None:
            self._compressor_baselines = compute_compressed_bits_per_byte(self._iter_texts())
        return self._compressor_baselines

    def _iter_texts(self) -> Iterator[bytes]:
        for document in self._windows.documents:
            without_end = self._shards.get_tokens(document)[:-1].tolist()
            yield self._tokenizer.decode(without_end).encode()


def compute_compressed_bits_per_byte(texts: Iterator[bytes]) -> tuple[float, float]:
    """Bits per byte of gzip -9 and xz -9 (streaming; memory does not grow with the text)."""
    gzip = zlib.compressobj(9, zlib.DEFLATED, 31)
    xz = lzma.LZMACompressor(preset=9)
    size = gzip_size = xz_size = 0
    for text in texts:
        size += len(text)
        gzip_size += len(gzip.compress(text))
        xz_size += len(xz.compress(text))
    gzip_size += len(gzip.flush())
    xz_size += len(xz.flush())
    return 8 * gzip_size / max(size, 1), 8 * xz_size / max(size, 1)


@dataclass(frozen=True)
class MixtureResult:
    """What is true of all sources together, and of each."""

    combined: HeldoutEvaluation | TargetEvaluation
    sources: Mapping[str, HeldoutEvaluation | TargetEvaluation]

    def to_dict(self) -> dict[str, Any]:
        """The numbers of all together, and under `sources` those of each by name."""
        return self.combined.to_dict() | {"sources": {name: one.to_dict() for name, one in self.sources.items()}}


@dataclass(frozen=True)
class MixtureEvaluator:
    """Evaluates every source; a source weighs as much as it has held back, not as its share in training."""

    evaluators: Mapping[str, Evaluator]

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> EvaluationResult:
        """See Evaluator."""
        found: dict[str, Any] = {name: one.evaluate(compute_logits, device) for name, one in self.evaluators.items()}
        return MixtureResult(combine_results(list(found.values())), found)


def combine_results(
    results: Sequence[HeldoutEvaluation] | Sequence[TargetEvaluation],
) -> HeldoutEvaluation | TargetEvaluation:
    """The same numbers over the targets, or bytes, of all parts."""
    if isinstance(results[0], TargetEvaluation):
        mean = _build_weighted_mean(results, "evaluated_targets")
        loss = mean("loss")
        targets = sum(result.evaluated_targets for result in results if isinstance(result, TargetEvaluation))
        return TargetEvaluation(loss, math.exp(loss), mean("accuracy"), targets)
    by_token, by_byte = (
        _build_weighted_mean(results, "evaluated_tokens"),
        _build_weighted_mean(results, "evaluated_bytes"),
    )
    loss = by_token("loss")
    return HeldoutEvaluation(
        loss=loss,
        bits_per_byte=by_byte("bits_per_byte"),
        perplexity=math.exp(loss),
        evaluated_tokens=sum(result.to_dict()["evaluated_tokens"] for result in results),
        evaluated_bytes=sum(result.to_dict()["evaluated_bytes"] for result in results),
        gzip_bits_per_byte=by_byte("gzip_bits_per_byte"),
        xz_bits_per_byte=by_byte("xz_bits_per_byte"),
    )


def _build_weighted_mean(results: Sequence[EvaluationResult], weight: str) -> Callable[[str], float]:
    fields = [result.to_dict() for result in results]
    total = sum(one[weight] for one in fields)
    return lambda name: float(sum(one[name] * one[weight] for one in fields) / max(total, 1))
