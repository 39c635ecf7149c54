"""Encode pairs into two token files, with row n of one belonging to row n of the other.

Reads record batches of pairs. Writes a target file and a source file in the format of all token
files. Both sequences end with the end-of-sequence id. The target of a labelled text is the number
of its label instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA
from llmsys.data_pipeline.core.funnel import FunnelCounts
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.pairs.read import LineProblem, TextPair, build_dropped_pair_row
from llmsys.data_pipeline.tokenize.encode_documents import build_list_array
from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.dataset.token_shards import (
    ArrowFileWriter,
    build_token_schema,
    choose_token_dtype,
    describe_token_file,
    read_batches,
)
from llmsys.vocabulary.tokenizer import Tokenizer

STAGE = "tokens"
Tokens = list[list[int]]


@dataclass(frozen=True)
class PairLengthLimits:
    """Limit on the tokens of a pair (`max_length`, 0: none). A longer pair is dropped, or its
    source is cut (`cut`).
    """

    max_length: int
    cut: bool


def encode_pairs(
    report: Report,
    *,
    source: Path,
    batches: Sequence[int],
    outputs: tuple[Path, ...],
    model: Path,
    labels: tuple[str, ...] | None,
    limits: PairLengthLimits,
) -> dict[str, Any]:
    """Encode some record batches of pairs. Progress is in pairs.

    Args:
        report: Progress callback.
        source: File of pairs.
        batches: Record batches to encode.
        outputs: Files to write: targets, sources, dropped pairs.
        model: Tokenizer file.
        labels: Names of the labels in the order of their numbers. None for translations.
        limits: Limit on the tokens of a pair.

    Returns:
        Descriptions of both token files, funnel counts, and the number of cut sources.
    """
    tokenizer = load_dataset_tokenizer(model)
    schema = build_token_schema(choose_token_dtype(tokenizer.vocab_size))
    tally = FunnelCounts()
    cut = 0
    with (
        ArrowFileWriter(outputs[0], schema) as targets,
        ArrowFileWriter(outputs[1], schema) as sources,
        ArrowFileWriter(outputs[2], DROPPED_SCHEMA, "zstd") as rejected,
    ):
        for batch in read_batches(source, batches):
            encoded = _EncodedBatch(batch, tokenizer, labels)
            cut += encoded.truncate_sources(limits)
            good, bad = encoded.split_by_length(limits)
            tally.add_drops(bad)
            tally.add_amounts(STAGE, documents_in=batch.num_rows, documents_out=len(good))
            tally.add_amounts(
                STAGE,
                bytes_in=encoded.count_text_bytes(range(batch.num_rows)),
                bytes_out=encoded.count_text_bytes(good),
            )
            if good:
                targets.write(encoded.build_token_rows("target", good, schema))
                sources.write(encoded.build_token_rows("source", good, schema))
            if bad:
                rejected.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(batch.num_rows, len(bad))
    files = [describe_token_file(path).model_dump() for path in outputs[:2]]
    return {"targets": files[0], "sources": files[1], "tally": tally.to_dict(), "cut": cut}


class _EncodedBatch:
    """One record batch of pairs with the tokens of both sides."""

    def __init__(
        self, batch: pa.RecordBatch, tokenizer: Tokenizer, labels: tuple[str, ...] | None
    ) -> None:
        self.batch = batch
        self.texts = {side: batch.column(side).to_pylist() for side in ("source", "target")}
        self.tokens = {"source": _encode_with_eos(tokenizer, self.texts["source"])}
        if labels is None:
            self.tokens["target"] = _encode_with_eos(tokenizer, self.texts["target"])
        else:
            # A label is one token without an end.
            self.tokens["target"] = [[labels.index(label)] for label in self.texts["target"]]

    def truncate_sources(self, limits: PairLengthLimits) -> int:
        """Cut long sources before their end-of-sequence id. Return the number of cut sources."""
        if not limits.cut:
            return 0
        long = [
            row
            for row, tokens in enumerate(self.tokens["source"])
            if len(tokens) > limits.max_length
        ]
        for row in long:
            tokens = self.tokens["source"][row]
            self.tokens["source"][row] = [*tokens[: limits.max_length - 1], tokens[-1]]
        return len(long)

    def split_by_length(self, limits: PairLengthLimits) -> tuple[list[int], list[dict[str, Any]]]:
        """Return the rows that are short enough, and the others as dropped rows."""
        good = []
        bad = []
        for row in range(self.batch.num_rows):
            problem = self._find_length_problem(row, limits.max_length)
            if problem is None:
                good.append(row)
                continue
            number, file, name = (
                self.batch.column(key)[row].as_py() for key in ("line", "file", "id")
            )
            line = TextPair(number, self.texts["source"][row], self.texts["target"][row], problem)
            bad.append(build_dropped_pair_row(line, name, file, STAGE))
        return good, bad

    def _find_length_problem(self, row: int, max_length: int) -> LineProblem | None:
        for side in ("source", "target"):
            length = len(self.tokens[side][row])
            if max_length and length > max_length:
                return LineProblem(
                    f"{side}_tokens",
                    length,
                    max_length,
                    f"the {side} has {length} tokens, more than {max_length}",
                )
        return None

    def count_text_bytes(self, rows: Sequence[int]) -> int:
        """Return the UTF-8 bytes of both sides of these rows."""
        return sum(len(self.texts[side][row].encode()) for side in self.texts for row in rows)

    def build_token_rows(self, side: str, rows: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
        """Build token rows of one side of these rows. `offset` is the line number."""
        chosen = [self.tokens[side][row] for row in rows]
        lengths = np.fromiter(map(len, chosen), np.int64, len(chosen))
        dtype = schema.field("tokens").type.value_type.to_pandas_dtype()
        values = np.fromiter(chain.from_iterable(chosen), dtype, int(lengths.sum()))
        kept = self.batch.take(pa.array(rows, pa.int64()))
        columns = [
            build_list_array(values, lengths, schema),
            kept.column("id"),
            kept.column("file"),
            kept.column("line"),
            # The hash of a URL, which pairs have not.
            pa.array(np.zeros(len(rows), np.uint64)),
            pa.array([len(self.texts[side][row].encode()) for row in rows], pa.int64()),
        ]
        return pa.record_batch(columns, schema=schema)


def _encode_with_eos(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    return [[*tokens, tokenizer.eos_id] for tokens in tokenizer.encode_batch(texts)]
