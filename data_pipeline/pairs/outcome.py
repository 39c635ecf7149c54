"""What the stages have made of pairs, said in a manifest: the same for any workers, as for documents."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.funnel import Tally
from data_pipeline.journal import Output, Record, digest_of
from data_pipeline.pairs import encode, read
from data_pipeline.pairs.pipeline import SPLITS, PairsOutcome
from data_pipeline.stages.collect import LENGTH_EDGES
from llmsys.config.pairs import LabelledConfig, PairsConfig
from llmsys.config.tokenizer import TokenizerConfig
from llmsys.errors import DataError
from llmsys.manifest import (
    DocumentFile,
    DocumentFiles,
    Histogram,
    Manifest,
    ReadSummary,
    Split,
    SplitName,
    TokenFile,
    dataset_fingerprint,
)
from llmsys.redact import redact_values
from llmsys.shards import token_dtype


def pairs_manifest(data: PairsConfig | LabelledConfig, tokenizer: TokenizerConfig, outcome: PairsOutcome) -> Manifest:
    """Say what was made; DataError when every training pair was too long."""
    config = {
        "data": data.model_dump(mode="json", exclude={"folder", "executor"}),
        "tokenizer": tokenizer.model_dump(mode="json"),
    }
    made: dict[str, Any] = outcome.tokenizer.result if outcome.tokenizer else {}
    splits = dict(_splits(outcome.encoded))
    if splits and not splits["train"].documents:
        raise DataError(f"every training pair is longer than data.max_tokens={data.max_tokens}. Raise it.")
    documents = _documents(outcome.read)
    digests = [file.digest for split in splits.values() for file in split.files]
    return Manifest(
        name=data.name,
        fingerprint=dataset_fingerprint(made.get("fingerprint"), digests or [file.digest for file in documents.files]),
        config=redact_values(config),
        config_digest=digest_of(config),
        vocab_size=made.get("vocab_size"),
        token_dtype=token_dtype(made["vocab_size"]) if made else None,
        tokenizer_fingerprint=made.get("fingerprint"),
        splits=splits,
        documents=documents,
        dropped=_dropped(outcome),
        funnel=_tally(outcome).funnel([read.STAGE, *([encode.STAGE] if splits else [])]),
        languages={},
        lengths=_lengths(outcome.read),
        read=ReadSummary(files=sum(len(one) for one in outcome.files.values()), records=_lines(outcome), html_bytes=0),
        labels=outcome.labels or (),
    )


def _splits(encoded: dict[str, list[Record]]) -> Iterator[tuple[SplitName, Split]]:
    names: tuple[tuple[SplitName, str, str], ...] = (
        ("train", "train", "targets"),
        ("heldout", "heldout", "targets"),
        ("train_source", "train", "sources"),
        ("heldout_source", "heldout", "sources"),
    )
    for name, split, side in names if encoded else ():
        files = tuple(TokenFile.model_validate(record.result[side]) for record in encoded[split])
        yield (
            name,
            Split(
                documents=sum(file.rows for file in files),
                tokens=sum(file.tokens for file in files),
                bytes=sum(file.text_bytes for file in files),
                files=files,
            ),
        )


def _documents(found: dict[str, list[Record]]) -> DocumentFiles:
    records = [record for split in SPLITS for record in found[split]]
    return DocumentFiles(files=tuple(_file(record.outputs[0], sum(record.result["rows"])) for record in records))


def _dropped(outcome: PairsOutcome) -> DocumentFiles:
    read_files = [(record.outputs[1], record) for split in SPLITS for record in outcome.read[split]]
    encoded = [(record.outputs[2], record) for records in outcome.encoded.values() for record in records]
    return DocumentFiles(files=tuple(_file(made, _drops(record)) for made, record in [*read_files, *encoded]))


def _drops(record: Record) -> int:
    return sum(drop["documents"] for drop in record.result["tally"]["drops"])


def _file(made: Output, rows: int) -> DocumentFile:
    return DocumentFile(name=Path(made.name).name, rows=rows, size=made.size, digest=made.digest)


def _tally(outcome: PairsOutcome) -> Tally:
    tally = Tally()
    for records in [*outcome.read.values(), *outcome.encoded.values()]:
        for record in records:
            tally.add(Tally(record.result["tally"]))
    return tally


def _lengths(found: dict[str, list[Record]]) -> Histogram:
    lengths = [record.result["lengths"] for records in found.values() for record in records]
    counts: Any = np.sum(lengths, axis=0, dtype=np.int64)
    return Histogram(edges=LENGTH_EDGES, counts=tuple(counts.tolist()))


def _lines(outcome: PairsOutcome) -> int:
    return _tally(outcome).stages[read.STAGE]["documents_in"]
