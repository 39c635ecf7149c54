"""The last stage: pairs in, two token files out, row n of one belonging to row n of the other.

Reads record batches of read pairs, writes a target and a source file in the format of all token files. Both sequences
end with the end-of-sequence id; the target of a labelled text is the number of its label instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.document import DROPPED_SCHEMA
from data_pipeline.executors.event import Report
from data_pipeline.funnel import Tally
from data_pipeline.pairs.line import Line, Problem
from data_pipeline.pairs.read import dropped_pair
from data_pipeline.tokenize.encode import token_lists
from llmsys.shards import ShardWriter, describe_token_file, read_batches, token_dtype, token_schema
from llmsys.tokenizer import Tokenizer, load_tokenizer

STAGE = "tokens"
Tokens = list[list[int]]


@dataclass(frozen=True)
class Limits:
    """What may become of a long pair: nothing (`longest` 0), or it is dropped, or its source is cut."""

    longest: int
    cut: bool


def encode_pairs(
    report: Report,
    *,
    source: Path,
    batches: Sequence[int],
    outputs: tuple[Path, ...],
    model: Path,
    labels: tuple[str, ...] | None,
    limits: Limits,
) -> dict[str, Any]:
    """Encode some record batches into (targets, sources, dropped); progress is in pairs."""
    tokenizer = load_tokenizer(model)
    schema = token_schema(token_dtype(tokenizer.vocab_size))
    tally, cut = Tally(), 0
    with (
        ShardWriter(outputs[0], schema) as targets,
        ShardWriter(outputs[1], schema) as sources,
        ShardWriter(outputs[2], DROPPED_SCHEMA, "zstd") as refused,
    ):
        for batch in read_batches(source, batches):
            encoded = _Encoded(batch, tokenizer, labels)
            cut += encoded.shorten(limits)
            good, bad = encoded.within(limits)
            tally.drop(bad)
            tally.count(STAGE, documents_in=batch.num_rows, documents_out=len(good))
            tally.count(STAGE, bytes_in=encoded.bytes(range(batch.num_rows)), bytes_out=encoded.bytes(good))
            if good:
                targets.write(encoded.rows("target", good, schema))
                sources.write(encoded.rows("source", good, schema))
            if bad:
                refused.write(pa.RecordBatch.from_pylist(bad, schema=DROPPED_SCHEMA))
            report(batch.num_rows, len(bad))
    files = [describe_token_file(path).model_dump() for path in outputs[:2]]
    return {"targets": files[0], "sources": files[1], "tally": tally.plain(), "cut": cut}


class _Encoded:
    """One record batch of pairs with the tokens of both sides."""

    def __init__(self, batch: pa.RecordBatch, tokenizer: Tokenizer, labels: tuple[str, ...] | None) -> None:
        self.batch = batch
        self.texts = {side: batch.column(side).to_pylist() for side in ("source", "target")}
        self.tokens = {"source": _closed(tokenizer, self.texts["source"])}
        if labels is None:
            self.tokens["target"] = _closed(tokenizer, self.texts["target"])
        else:
            self.tokens["target"] = [[labels.index(label)] for label in self.texts["target"]]

    def shorten(self, limits: Limits) -> int:
        """Cut long sources, keeping their closing token, and return how many were cut."""
        if not limits.cut:
            return 0
        long = [row for row, tokens in enumerate(self.tokens["source"]) if len(tokens) > limits.longest]
        for row in long:
            tokens = self.tokens["source"][row]
            self.tokens["source"][row] = [*tokens[: limits.longest - 1], tokens[-1]]
        return len(long)

    def within(self, limits: Limits) -> tuple[list[int], list[dict[str, Any]]]:
        """The rows that are short enough, and the others as dropped rows."""
        good, bad = [], []
        for row in range(self.batch.num_rows):
            problem = self._problem(row, limits.longest)
            if problem is None:
                good.append(row)
                continue
            number, file, name = (self.batch.column(key)[row].as_py() for key in ("line", "file", "id"))
            line = Line(number, self.texts["source"][row], self.texts["target"][row], problem)
            bad.append(dropped_pair(line, name, file, STAGE))
        return good, bad

    def _problem(self, row: int, longest: int) -> Problem | None:
        for side in ("source", "target"):
            length = len(self.tokens[side][row])
            if longest and length > longest:
                return Problem(
                    f"{side}_tokens", length, longest, f"the {side} has {length} tokens, more than {longest}"
                )
        return None

    def bytes(self, rows: Sequence[int]) -> int:
        """UTF-8 bytes of both sides of these rows."""
        return sum(len(self.texts[side][row].encode()) for side in self.texts for row in rows)

    def rows(self, side: str, rows: Sequence[int], schema: pa.Schema) -> pa.RecordBatch:
        """One side of these rows as token rows; `offset` is the line's number."""
        chosen = [self.tokens[side][row] for row in rows]
        lengths = np.fromiter(map(len, chosen), np.int64, len(chosen))
        dtype = schema.field("tokens").type.value_type.to_pandas_dtype()
        values = np.fromiter(chain.from_iterable(chosen), dtype, int(lengths.sum()))
        kept = self.batch.take(pa.array(rows, pa.int64()))
        columns = [
            token_lists(values, lengths, schema),
            kept.column("id"),
            kept.column("file"),
            kept.column("line"),
            pa.array(np.zeros(len(rows), np.uint64)),
            pa.array([len(self.texts[side][row].encode()) for row in rows], pa.int64()),
        ]
        return pa.record_batch(columns, schema=schema)


def _closed(tokenizer: Tokenizer, texts: list[str]) -> Tokens:
    return [[*tokens, tokenizer.eos_id] for tokens in tokenizer.encode_batch(texts)]
