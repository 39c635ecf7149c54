"""Token files by cells of places: every document once and in the order of places, also where
cells touch.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys.data_pipeline.tokenize.encode_documents import build_encoded_schema
from llmsys.data_pipeline.tokenize.shuffle_documents import CELLS_BITS, plan_files, write_token_file
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches


def test_a_document_of_the_first_cell_of_a_file_is_in_no_other(tmp_path: Path) -> None:
    schema, cells = build_encoded_schema(400), [5, 2, 7, 0, 4, 1, 6, 3]
    empty: dict[str, Any] = {
        field.name: "" if pa.types.is_string(field.type) else 0 for field in schema
    }
    rows = [
        empty
        | {"tokens": [cell] * 10, "id": str(cell), "place": cell << (64 - CELLS_BITS), "heldout": 0}
        for cell in cells
    ]
    with ArrowFileWriter(tmp_path / "encoded.arrow", schema) as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, schema))
    found = []
    for plan in plan_files([tmp_path / "encoded.arrow"], "train", 20):
        output = tmp_path / plan.name
        arguments: dict[str, Any] = {
            "plan": plan,
            "sources": [tmp_path / "encoded.arrow"],
            "output": output,
        }
        write_token_file(lambda amount, dropped: None, **arguments, vocab_size=400, batch_tokens=15)
        found.append([row["id"] for batch in read_batches(output) for row in batch.to_pylist()])
    assert found == [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
