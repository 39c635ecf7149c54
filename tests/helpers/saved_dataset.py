"""Folders as `save_to_disk` of Hugging Face's datasets writes them, without that library."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def save_to_disk(folder: Path, split: str, rows: list[dict[str, Any]]) -> None:
    """Write a split as `Dataset.save_to_disk` does: streams of Arrow, and state.json with their
    names.
    """
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(rows)
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": split})
    )
