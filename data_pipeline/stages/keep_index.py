"""What stays of a file in, its part of the dataset's index out: ids of documents, and their keys in sorted runs.

`index_file` takes the keys of dropped documents away and numbers the others anew; `write_index` names all parts with
their digests, last of all, so that an index that is there is whole.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.dedup.decisions import dropped_in, without_rows
from data_pipeline.dedup.keys import KeyWriter, taken
from data_pipeline.executors.event import Report
from llmsys.manifest import publish_bytes
from llmsys.shards import ShardWriter, read_batches, read_schema

INDEX_DOCUMENT_SCHEMA = pa.schema([("id", pa.string())])


def index_file(
    report: Report,
    *,
    number: int,
    dropped: Sequence[Path],
    documents: Path,
    keys: Mapping[str, Path],
    outputs: Mapping[str, Path],
) -> dict[str, Any]:
    """Write ids ("documents") and keys (by relation) of the rows that stay of a file; progress is in documents."""
    gone = dropped_in(dropped, number)
    rows = 0
    with ShardWriter(outputs["documents"], INDEX_DOCUMENT_SCHEMA) as writer:
        for batch in read_batches(documents):
            stays = without_rows(np.arange(rows, rows + batch.num_rows), gone)
            writer.write(pa.record_batch([batch.column("id").filter(pa.array(stays))], schema=INDEX_DOCUMENT_SCHEMA))
            rows += batch.num_rows
            report(batch.num_rows, 0)
    for relation, path in keys.items():
        with KeyWriter(outputs[relation], read_schema(path)) as keeper:
            for batch in read_batches(path):
                columns = {name: batch.column(name).to_numpy() for name in batch.schema.names}
                columns = taken(columns, without_rows(columns["row"], gone))
                columns["row"] = columns["row"] - np.searchsorted(gone, columns["row"])
                keeper.write(columns)
    return {"rows": rows - len(gone)}


def write_index(report: Report, *, content: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Publish `index.json`."""
    publish_bytes(output, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())
    report(1, 0)
    return {}
