"""A dataset with documents/, and a record of made-up losses of a run on it."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import yaml

from llmsys.dataset.loss_parts import LOSS_SCHEMA, write_loss_part
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.storage.stored_formats import DOCUMENTS
from tests.helpers.dataset import VOCABULARY, make_dataset

NUM_DOCUMENTS = 60
HOSTS = ("www.a.example.com", "b.example.com", "c.example.co.uk")


class RecordedLosses(NamedTuple):
    """A run with a record.

    Attributes:
        config: Its config.
        run: Its folder.
        data: The folder of its dataset.
        rows: The record, in the columns of `LOSS_SCHEMA`.
        documents: Rows of documents/, by id.
    """

    config: Path
    run: Path
    data: Path
    rows: list[dict[str, Any]]
    documents: dict[str, dict[str, Any]]


def write_recorded_losses(folder: Path) -> RecordedLosses:
    """Write dataset, config and record; two ranks, three epochs, and a step that was skipped."""
    data = make_dataset(folder / "data", documents=NUM_DOCUMENTS)
    documents = {f"{number:032x}": _build_document(number) for number in range(NUM_DOCUMENTS)}
    _write_documents(data, list(documents.values()))
    settings = {
        "run": {"folder": str(folder / "run")},
        "data": {"folder": str(data)},
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": {
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 1, "num_attention_heads": 2,
        },
        "train": {"tokens": 100_000, "record_document_losses": True},
    }  # fmt: skip
    config = folder / "recorded.yaml"
    config.write_text(yaml.safe_dump(settings))
    rows = _build_rows()
    print_ = load_manifest(data).fingerprint
    for rank in (0, 1):
        for first in (1, 16):
            part = [
                row
                for row in rows
                if row["document"] % 2 == rank and first <= row["step"] < first + 15
            ]
            batch = pa.RecordBatch.from_pylist(part, schema=LOSS_SCHEMA)
            write_loss_part(folder / "run", rank, batch, [print_])
    return RecordedLosses(config, folder / "run", data, rows, documents)


def _build_document(number: int) -> dict[str, Any]:
    return {
        "id": f"{number:032x}",
        "url": f"https://{HOSTS[number % 3]}/{number}",
        "date": f"2024-{number % 4 + 1:02d}-05T00:00:00Z",
        "language": None if number % 5 == 0 else "en",
        "text": f"<b>Text</b> of document {number}. " * 40,
        "gopher_quality.words": float(number),
    }


def _write_documents(data: Path, rows: list[dict[str, Any]]) -> None:
    """Write documents/ in two files, not in the order of the token files, with a document that is
    not in these.
    """
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("url", pa.string()),
            ("date", pa.string()),
            ("language", pa.string()),
            ("text", pa.large_string()),
            ("gopher_quality.words", pa.float32()),
        ],
        DOCUMENTS.arrow_metadata,
    )
    (data / "documents").mkdir()
    rows = [*rows, _build_document(7_000)]
    random.Random(3).shuffle(rows)
    for number, half in enumerate((rows[:25], rows[25:])):
        path = data / "documents" / f"part-{number:05d}.arrow"
        with ArrowFileWriter(path, schema, compression="zstd") as writer:
            for start in range(0, len(half), 10):
                batch = half[start : start + 10]
                writer.write(pa.RecordBatch.from_pylist(batch, schema=schema))


def _build_rows() -> list[dict[str, Any]]:
    """Return rows in which losses fall with the steps, and differ by host."""
    choose = random.Random(5)
    rows = []
    for step in range(1, 31):
        for document in choose.sample(range(NUM_DOCUMENTS - 2), 8):
            tokens = choose.randrange(1, 40)
            loss = 6 - step / 10 + document % 3 + choose.gauss(0, 0.1)
            rows.append(
                {
                    "step": step,
                    "source": 0,
                    "epoch": (step - 1) // 10,
                    "document": document,
                    "tokens": tokens,
                    "nats": float("nan") if step == 13 else loss * tokens,
                    "applied": step != 13,
                }
            )
    return rows
