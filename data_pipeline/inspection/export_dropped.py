"""Write dropped documents with their whole texts to one file: parquet, or JSON lines.

Reads dropped/ of a dataset folder, whose texts are excerpts, and work/extracted.packs, which has
whole texts as they were extracted: before lines were removed and Unicode repaired. A page that was
never extracted has no text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys.data_pipeline.core.document_schema import DROPPED_SCHEMA, concat_batches
from llmsys.data_pipeline.core.task_record import list_extracted_texts
from llmsys.data_pipeline.inspection.dropped_documents import describe_no_match, iter_matches
from llmsys.data_pipeline.stages.export_documents import open_document_writer
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import ConfigError, DataError
from llmsys.progress import Progress

FORMATS = ("parquet", "jsonl.zst", "jsonl")
_BATCH_ROWS = 1_000
_FURTHER = "(further columns)"  # no column has such a name


def export_dropped_documents(folder: Path, wanted: dict[str, str], output: Path) -> tuple[int, int]:
    """Write dropped documents, in the order of the input files.

    Args:
        folder: the dataset folder.
        wanted: values of stage, rule and test to match.
        output: file to write; its ending is the format.

    Returns:
        Number of documents, and how many of them have no text because nothing was extracted from
        their page.

    Raises:
        ConfigError: the ending is no format, or the file exists.
        DataError: nothing matches, or the whole texts were deleted.
    """
    form = next((form for form in FORMATS if output.name.endswith(f".{form}")), None)
    if form is None:
        raise ConfigError(
            f"--output {output} ends in no format. Use .{', .'.join(FORMATS[:-1])} or "
            f".{FORMATS[-1]}."
        )
    if output.exists():
        raise ConfigError(
            f"--output {output} exists already. Name another file, or remove it first."
        )
    rows = {}
    for found in iter_matches(folder, wanted):
        # The columns of the input stay Arrow, whatever their type.
        further = found.select([n for n in found.schema.names if n not in DROPPED_SCHEMA.names])
        for number, row in enumerate(found.select(DROPPED_SCHEMA.names).to_pylist()):
            place = row["file"], row["offset"]
            rows[place] = row | {"text": None, _FURTHER: further.slice(number, 1)}
    if not rows:
        raise DataError(describe_no_match(folder, wanted))
    sources = list_extracted_texts(folder)
    if not sources:
        raise DataError(
            f"the extracted documents in {folder}/work are gone, which have the whole texts. Make "
            "them again: llmsys prepare CONFIG"
        )
    total = len(rows)
    missing = len(rows)
    schema = pa.schema([*DROPPED_SCHEMA, *further.schema])
    with (
        open_document_writer(output, form, schema) as write,
        Progress("export", total=total, unit="document") as shown,
    ):
        for source in sources:
            for batch in read_batches(source):
                names = zip(
                    batch.column("file").to_pylist(),
                    batch.column("offset").to_pylist(),
                    strict=True,
                )
                chosen = [number for number, name in enumerate(names) if name in rows]
                picked = (
                    batch.take(pa.array(chosen, pa.int64()))
                    .select(["file", "offset", "text"])
                    .to_pylist()
                )
                full = [
                    rows.pop((one["file"], one["offset"])) | {"text": one["text"] or ""}
                    for one in picked
                ]
                missing -= sum(bool(one["text"]) for one in full)
                if full:
                    write(_build_batch(full, schema))
                shown.advance(len(full))
        left = [row | {"text": ""} for row in rows.values()]  # places that could not be read
        for start in range(0, len(left), _BATCH_ROWS):
            write(_build_batch(left[start : start + _BATCH_ROWS], schema))
    return total, missing


def _build_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Return dropped documents with the columns of the input."""
    own = pa.RecordBatch.from_pylist(list(rows), pa.schema([*DROPPED_SCHEMA]))
    further = concat_batches([row[_FURTHER] for row in rows])
    return pa.record_batch([*own.columns, *further.columns], schema=schema)
