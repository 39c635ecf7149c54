"""Evaluate next-token loss on held-out documents, in nats per token and bits per byte, with gzip
and xz as baselines.

The sources of a mixture are evaluated separately and combined.
"""

import lzma
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, assert_never

import torch

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.data.heldout_batches import HeldoutWindows
from llmsys.data.heldout_chats import HeldoutChats
from llmsys.dataset.token_shards import TokenShards
from llmsys.train.evaluator import (
    ALONE,
    EvaluationResult,
    Evaluator,
    LogitsFunction,
    RowRanks,
    TargetEvaluation,
    remove_empty_metrics,
    sum_over_rows,
)
from llmsys.train.python_metric import MetricValue, load_python_metrics
from llmsys.vocabulary.tokenizer import Tokenizer

# 1 / ln 2.
BITS_PER_NAT = 1.4426950408889634


@dataclass(frozen=True)
class HeldoutEvaluation:
    """Loss of a model on held-out text: every byte, and the end of each document; of chats the
    answers.
    """

    loss: float
    bits_per_byte: float
    perplexity: float
    evaluated_tokens: int
    evaluated_bytes: int
    gzip_bits_per_byte: float
    xz_bits_per_byte: float
    metrics: dict[str, MetricValue] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for events and JSON."""
        return remove_empty_metrics(asdict(self))


def build_heldout_windows(
    config: RunConfig, shards: TokenShards, tokenizer: Tokenizer
) -> HeldoutWindows:
    """Build the windows of the held-out documents.

    Args:
        config: The config; `evaluation.sequence_length` and `evaluation.max_tokens` limit them.
        shards: The held-out split.
        tokenizer: Its end-of-sequence id opens each document.

    Returns:
        Windows in which every held-out token is a target once.
    """
    return HeldoutWindows(
        shards,
        length=config.evaluation.resolve_sequence_length(config.batch.sequence_length),
        opening_token=tokenizer.eos_id,
        separate_documents=config.batch.attention_scope == "document",
        max_tokens=config.evaluation.max_tokens,
    )


class HeldoutTextRows(Protocol):
    """Held-out rows of text.

    Attributes:
        num_rows: the number of rows.
        tokens: targets of all rows.
        text_bytes: UTF-8 bytes that they stand for.
    """

    num_rows: int
    tokens: int
    text_bytes: int

    def get_batch(self, first: int, count: int) -> Batch:
        """Return consecutive rows.

        Args:
            first: Number of the first row, counted from 0.
            count: Rows of the batch. Those past the end have no valid targets.

        Returns:
            The batch.
        """
        ...

    def iter_texts(self) -> Iterator[bytes]:
        """Yield the UTF-8 text that is scored."""
        ...


class HeldoutDocuments:
    """Windows over held-out documents, and the text of the documents."""

    def __init__(self, config: RunConfig, shards: TokenShards, tokenizer: Tokenizer) -> None:
        self._windows = build_heldout_windows(config, shards, tokenizer)
        self._shards = shards
        self._tokenizer = tokenizer
        self.num_rows = self._windows.num_rows
        self.tokens = self._windows.tokens
        self.text_bytes = self._windows.text_bytes

    def get_batch(self, first: int, count: int) -> Batch:
        """Implement `HeldoutTextRows.get_batch`."""
        return self._windows.get_batch(first, count)

    def iter_texts(self) -> Iterator[bytes]:
        """Yield the UTF-8 text of each document."""
        for document in self._windows.documents:
            without_end = self._shards.get_tokens(document)[:-1].tolist()
            yield self._tokenizer.decode(without_end).encode()


def _build_heldout_rows(
    config: RunConfig, shards: TokenShards, tokenizer: Tokenizer
) -> HeldoutTextRows:
    if not shards.manifest.answers:
        return HeldoutDocuments(config, shards, tokenizer)
    length = config.evaluation.resolve_sequence_length(config.batch.sequence_length)
    return HeldoutChats(shards, tokenizer, length=length, max_tokens=config.evaluation.max_tokens)


class HeldoutEvaluator:
    """An evaluator of the held-out split; the compressors run once, at the first evaluation.

    `row_ranks` get the same rows, see `compute_row_metrics`.
    """

    def __init__(
        self,
        config: RunConfig,
        shards: TokenShards,
        tokenizer: Tokenizer,
        row_ranks: RowRanks = ALONE,
    ) -> None:
        """Read the held-out rows into memory.

        Args:
            config: The config of the run.
            shards: The held-out split.
            tokenizer: The tokenizer of the split; it gives the text whose bytes are counted.
            row_ranks: The ranks that get the same rows, see `compute_row_metrics`. Default: this
                one alone.
        """
        self._row_ranks = row_ranks
        self._sequences = config.evaluation_sequences
        self._rows = _build_heldout_rows(config, shards, tokenizer)
        self._metrics = load_python_metrics(config.evaluation.metrics, config.model.vocab_size)
        self._compressor_baselines: tuple[float, float] | None = None

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> HeldoutEvaluation:
        """Evaluate this rank's windows and sum over all ranks. Collective.

        Args:
            compute_logits: Runs the model on a batch.
            device: Device of this rank.

        Returns:
            Loss, bits per byte and the baselines of compressors, the same on every rank.
        """
        rows = self._rows
        sums = sum_over_rows(
            rows, compute_logits, device, self._row_ranks, self._sequences, self._metrics
        )
        nats = sums.nats
        gzip, xz = self.compute_compressor_baselines()
        loss = nats / rows.tokens
        return HeldoutEvaluation(
            loss=loss,
            bits_per_byte=nats * BITS_PER_NAT / rows.text_bytes,
            perplexity=float(torch.tensor(loss).exp()),
            evaluated_tokens=rows.tokens,
            evaluated_bytes=rows.text_bytes,
            gzip_bits_per_byte=gzip,
            xz_bits_per_byte=xz,
            metrics=sums.metrics,
        )

    def compute_compressor_baselines(self) -> tuple[float, float]:
        """Return the bits per byte of `gzip -9` and `xz -9` on the concatenated documents that
        are evaluated.
        """
        if self._compressor_baselines is None:
            self._compressor_baselines = compute_compressed_bits_per_byte(self._rows.iter_texts())
        return self._compressor_baselines


def compute_compressed_bits_per_byte(texts: Iterator[bytes]) -> tuple[float, float]:
    """Compress texts with gzip -9 and xz -9, as baselines for bits per byte.

    Args:
        texts: UTF-8 texts; they are compressed as one stream, so memory does not grow with them.

    Returns:
        Bits of the compressed stream per byte of text, of gzip and of xz.
    """
    # 31: the window of 32 KiB with a gzip header, as the command writes it.
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
    """The result over all sources, and that of each source."""

    combined: HeldoutEvaluation | TargetEvaluation
    sources: Mapping[str, HeldoutEvaluation | TargetEvaluation]

    def to_dict(self) -> dict[str, Any]:
        """Return the combined numbers, and under `sources` those of each source by name."""
        return self.combined.to_dict() | {
            "sources": {name: one.to_dict() for name, one in self.sources.items()}
        }


@dataclass(frozen=True)
class MixtureEvaluator:
    """An evaluator of every source; a source weighs as much as it has held out, not as its share
    in training.
    """

    evaluators: Mapping[str, Evaluator]

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> EvaluationResult:
        """Evaluate every source and combine the results. Collective.

        Args:
            compute_logits: Runs the model on a batch.
            device: Device of this rank.

        Returns:
            The result of all sources, and that of each.
        """
        found: dict[str, Any] = {
            name: one.evaluate(compute_logits, device) for name, one in self.evaluators.items()
        }
        return MixtureResult(combine_results(list(found.values())), found)


def combine_results(
    results: Sequence[HeldoutEvaluation] | Sequence[TargetEvaluation],
) -> HeldoutEvaluation | TargetEvaluation:
    """Combine the results of several held-out sets.

    Args:
        results: The result of each.

    Returns:
        Means over the targets, tokens or bytes of all.
    """
    match results[0]:
        case TargetEvaluation():
            return _combine_target_results(results)
        case HeldoutEvaluation():
            return _combine_heldout_results(results)
        case unreachable:
            assert_never(unreachable)


def _combine_target_results(results: Sequence[EvaluationResult]) -> TargetEvaluation:
    mean = _build_weighted_mean(results, "evaluated_targets")
    loss = mean("loss")
    targets = sum(result.to_dict()["evaluated_targets"] for result in results)
    metrics = _combine_metrics(results, "evaluated_targets")
    return TargetEvaluation(loss, math.exp(loss), mean("accuracy"), targets, metrics)


def _combine_heldout_results(results: Sequence[EvaluationResult]) -> HeldoutEvaluation:
    by_token = _build_weighted_mean(results, "evaluated_tokens")
    by_byte = _build_weighted_mean(results, "evaluated_bytes")
    loss = by_token("loss")
    return HeldoutEvaluation(
        loss=loss,
        bits_per_byte=by_byte("bits_per_byte"),
        perplexity=math.exp(loss),
        evaluated_tokens=sum(result.to_dict()["evaluated_tokens"] for result in results),
        evaluated_bytes=sum(result.to_dict()["evaluated_bytes"] for result in results),
        gzip_bits_per_byte=by_byte("gzip_bits_per_byte"),
        xz_bits_per_byte=by_byte("xz_bits_per_byte"),
        metrics=_combine_metrics(results, "evaluated_tokens"),
    )


def _combine_metrics(results: Sequence[EvaluationResult], weight: str) -> dict[str, MetricValue]:
    fields = [result.to_dict() for result in results]
    total = max(sum(one[weight] for one in fields), 1)
    return {
        name: MetricValue(
            sum(one["metrics"][name]["value"] * one[weight] for one in fields) / total,
            first["code"],
        )
        for name, first in fields[0].get("metrics", {}).items()
    }


def _build_weighted_mean(
    results: Sequence[EvaluationResult], weight: str
) -> Callable[[str], float]:
    fields = [result.to_dict() for result in results]
    total = sum(one[weight] for one in fields)
    return lambda name: float(sum(one[name] * one[weight] for one in fields) / max(total, 1))
